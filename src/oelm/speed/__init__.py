"""Everything that only makes training faster: packed texts, CUDA graphs, bf16 copies, kernels of our own.

The interface: `FastStep` computes the same as `training.step.PlainStep`, and a model within `fast_forward`
the same as without; `why_not` gives the reasons for fast paths that a device lacks. Everything else works
without this folder (tests/speed/test_removal.py removes it).
"""

from oelm.speed.capabilities import device_capabilities as why_not
from oelm.speed.forward import fast_forward
from oelm.speed.step import FastStep

__all__ = ["FastStep", "fast_forward", "why_not"]
