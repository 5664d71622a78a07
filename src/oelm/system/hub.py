"""Whether the Hugging Face hub can be reached; its libraries retry for half a minute before they fail."""

import functools
import os
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

TIMEOUT = 3.0  # seconds


def hub_reachable() -> bool:
    """Whether the hub answers, checked once per process. With a proxy it is assumed to."""
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
            socket.create_connection((hub_host(), port), TIMEOUT).close()
            connected.append(True)
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True)  # as the look-up of a name has no time limit
    thread.start()
    thread.join(TIMEOUT)
    return bool(connected)


def with_cache_only(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained`; without a network it looks in the cache only, without retries."""
    return arguments if Path(name).is_dir() or hub_reachable() else {"local_files_only": True} | arguments


def not_in_cache(name: str) -> str:
    """The message for a name that is not in the cache while the hub cannot be reached."""
    return f"{name} is neither a folder nor in the cache, and {hub_host()} cannot be reached"
