"""What the tests of real runs share: one small dataset, one fork server, and the unbroken runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oelm.config import make_config, read_toml
from oelm.data import open_store
from oelm.training import loop
from tests.training.runs import Machine, make_store, outcome


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("machine")
    return Machine(make_store(folder), folder)


@pytest.fixture(scope="session")
def unbroken(machine: Machine) -> Callable[..., tuple[Path, Path]]:
    """The configuration and the folder of a run of these settings that nothing disturbed, made once."""
    done: dict[str, tuple[Path, Path]] = {}

    def run(**training: Any) -> tuple[Path, Path]:
        key = repr(sorted(training.items()))
        if key not in done:
            config, out = machine.config(**training), machine.folder / f"unbroken-{len(done)}"
            ended = machine.run(config, out)
            assert ended.code == 0, ended.text
            outcome(out)
            done[key] = (config, out)
        return done[key]

    return run


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many threads as the forked runs have: the numbers must be theirs, bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def train_here(machine: Machine, one_thread: None) -> Callable[..., dict[str, Any]]:
    """Train in this process, where a test can tamper with what runs."""

    def train(config: Path, out: Path, **options: Any) -> dict[str, Any]:
        values = read_toml(config)
        values["task"]["data"] = str(machine.store)
        return loop.train(make_config(values), open_store(machine.store), out, show=False, **options)

    return train
