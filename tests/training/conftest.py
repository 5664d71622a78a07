"""What the tests of real runs share: one small data set, one fork server, and the unbroken runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
