"""The command line in the process of the tests."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from oelm.cli import main as cli


def caller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: (exit code, stdout, stderr)."""

    def call(*words: Any) -> tuple[int, str, str]:
        capsys.readouterr()  # what came before is not its own
        monkeypatch.setattr(sys, "argv", ["oelm", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call
