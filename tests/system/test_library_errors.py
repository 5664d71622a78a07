"""Texts of other libraries that we look into: the real errors, as far as a CPU can make them."""

import errno
import json
import subprocess
import sys

import pytest
import torch
import transformers

from oelm.system import library_errors
from oelm.system.library_errors import first_line, is_not_deterministic, is_out_of_memory, wants_remote_code

HUGE = 1 << 55  # elements, which no machine has room for


def test_out_of_memory():
    for fail in (lambda: torch.empty(HUGE), lambda: bytearray(HUGE)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            fail()
        assert is_out_of_memory(caught.value)
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) @ torch.zeros(3)
    assert not is_out_of_memory(caught.value)


def test_out_of_memory_of_a_library_that_is_loaded_late():
    """As the system says it where the address space is limited."""
    code = """
import resource, runpy, sys
is_out_of_memory = runpy.run_path(sys.argv[1])["is_out_of_memory"]
resource.setrlimit(resource.RLIMIT_AS, (1 << 27, 1 << 27))
try:
    import torch
except (ImportError, MemoryError, OSError) as error:
    print(is_out_of_memory(error), error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, library_errors.__file__], capture_output=True, text=True
    )
    assert done.stdout.startswith("True"), done.stdout + done.stderr


def test_an_operation_that_is_not_deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(before)
    assert is_not_deterministic(caught.value)
    assert not is_not_deterministic(RuntimeError("not deterministic"))


def test_a_checkpoint_with_code_of_its_own(tmp_path):
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("class Config: pass")
    with pytest.raises(ValueError, match="contains custom code") as caught:
        transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert wants_remote_code(caught.value)


def test_an_error_in_one_line():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(KeyError()) == "KeyError"
