"""GPU kernels, each with a plain PyTorch twin that defines it and stands in for it on other devices."""

from oelm.speed.value_only import value_only_attention, value_only_attention_varlen

__all__ = ["value_only_attention", "value_only_attention_varlen"]
