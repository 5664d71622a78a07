"""Whether the Hugging Face hub can be reached: its libraries try for half a minute before they say so."""

import functools
import os
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

PATIENCE = 3.0  # seconds


def hub_reachable() -> bool:
    """Whether the hub answers; asked once per process. A proxy is trusted to reach it."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    return "https" in getproxies() or _answers()


def hub_host() -> str:
    return urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or "huggingface.co"


@functools.cache
def _answers() -> bool:
    connected: list[bool] = []

    def connect() -> None:
        port = urlsplit(os.environ.get("HF_ENDPOINT", "")).port or 443
        try:
            socket.create_connection((hub_host(), port), PATIENCE).close()
            connected.append(True)
        except OSError:
            pass

    asking = threading.Thread(target=connect, daemon=True)  # the look-up of a name has no time limit
    asking.start()
    asking.join(PATIENCE)
    return bool(connected)


def with_cache_only(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained`; without a network only the cache is looked at, at once."""
    return arguments if Path(name).is_dir() or hub_reachable() else {"local_files_only": True} | arguments


def not_there(name: str) -> str:
    """What to say of a name that could not be found without a network."""
    return f"{name} is neither a folder nor in the cache, and {hub_host()} cannot be reached"
