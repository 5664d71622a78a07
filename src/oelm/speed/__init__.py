"""All that only makes training faster: packed texts, CUDA graphs, bf16 copies of weights, kernels of our own.

One interface: `FastStep` computes what `training.step.PlainStep` does, and a model within `fast_forward` what
it does without; `why_not` says what of it a device has not. Everything else works without this folder
(tests/speed/test_removal.py takes it away).
"""

from oelm.speed.capabilities import here as why_not
from oelm.speed.forward import fast_forward
from oelm.speed.step import FastStep

__all__ = ["FastStep", "fast_forward", "why_not"]
