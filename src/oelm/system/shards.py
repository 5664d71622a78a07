"""Tensors that FSDP2 has spread over processes."""

from torch import Tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor. A shard is gathered, so every process must ask; any other tensor is returned as
    it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
