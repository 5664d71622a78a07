"""Tensors that FSDP2 has sharded over processes."""

from torch import Tensor


def gathered(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, gathered from all processes, each of which must call this; any other tensor
    is returned as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
