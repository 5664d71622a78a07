"""All that only makes training faster: packed texts, CUDA graphs, bf16 copies of weights, kernels of our own.

One interface: `FastStep` computes what `training.step.PlainStep` does, and a model within `fast_forward` what
it does without; `why_not` says what of it a device has not. Everything else works without this folder
(tests/speed/test_removal.py takes it away).
"""

from oelm.speed.capabilities import why_not as why_not
from oelm.speed.forward import fast_forward as fast_forward
from oelm.speed.step import FastStep as FastStep
