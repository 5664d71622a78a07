"""What all tests share: where real data is, and what to do where it is not."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is not a failure; the time limit of each test is pytest's.
settings.register_profile("oelm", deadline=None)
settings.load_profile("oelm")


def _folder(variable: str) -> Path:
    """The folder a variable names. Absent: skip, or fail where CI says the data must be there."""
    value = os.environ.get(variable)
    if value and Path(value).is_dir():
        return Path(value)
    reason = f"{variable} does not name a folder"
    if os.environ.get("OELM_REQUIRE_DATA"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return _folder("OELM_DATA_DIR")


@pytest.fixture(scope="session")
def tokenizer_dir() -> Path:
    return _folder("OELM_TOKENIZER_DIR")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("compiler") and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile needs a C++ compiler, and none is on the PATH")


pytest_plugins = ["tests.run_fixtures"]
