"""The meaning of other libraries' errors that have no class or code of their own.

Only this module reads their texts; tests provoke the real errors.
"""

import errno
import re

_OUT_OF_MEMORY = (
    "not enough memory", "can't allocate memory",  # PyTorch on a CPU
    "out of memory",  # CUDA, where it is not torch.OutOfMemoryError
    "cannot allocate memory", "failed to map segment",  # the system; loading a shared library
    "bad_alloc",  # C++: safetensors, tokenizers
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory did not suffice (also under a limit such as `ulimit -v`), in any library's wording."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return isinstance(error, Exception) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def is_not_deterministic(error: BaseException) -> bool:
    """Whether PyTorch refused an operation because of `torch.use_deterministic_algorithms`."""
    return isinstance(error, RuntimeError) and "torch.use_deterministic_algorithms" in str(error)


def wants_remote_code(error: BaseException) -> bool:
    """Whether transformers refused a checkpoint because it would run the checkpoint's own code."""
    return "trust_remote_code" in str(error)


def why_not_written(error: OSError) -> str:
    """Why a file could not be written; NumPy says only how much of it was."""
    if re.search(r"\d+ requested and \d+ written", str(error)):
        return "the disk is full, or files may not be that large"
    return error.strerror or str(error)


def first_line(error: BaseException) -> str:
    """An error in one line, without the advice that libraries append for their own users."""
    first, *more = (str(error).strip() or type(error).__name__).splitlines()
    return (f"{first} {more[0].strip()}" if more and first.endswith(":") else first)[:400]
