"""A run is told to stop at any moment."""

import os
import signal

import pytest

from oelm.errors import Interrupted
from oelm.system import messages
from oelm.training.stopping import stopping


def test_a_signal_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may arrive while what opens files is being imported."""

    def broken(package: str) -> None:
        raise ImportError(package)

    messages.sentences.cache_clear()
    with stopping(None):
        monkeypatch.setattr(messages, "files", broken)
        with pytest.raises(Interrupted, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
