"""Without a network, names on the hub are looked for in the cache, at once."""

import socket
import time

import pytest

from oelm.errors import UserError
from oelm.models.pretrained import load_config
from oelm.system import hub


def test_the_hub_is_asked_once_and_a_dead_one_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub._answers.cache_clear()
        assert hub.hub_reachable()
        assert hub.with_cache_only("a/model", {}) == {}
    hub._answers.cache_clear()
    assert not hub.hub_reachable()
    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"^no/model is neither a folder nor in the cache, and 127\.0\.0\.1 can"
    ):
        load_config("no/model")
    assert time.monotonic() - began < 10  # retries would take 30
    hub._answers.cache_clear()
