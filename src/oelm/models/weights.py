"""Which files a checkpoint's weights may come from: safetensors in its own folder, and nothing else.

transformers unpickles a shard whose name in the index does not end in .safetensors, and loads an adapter from
the same folder, even a pickled one. So everything a checkpoint names is checked before it is loaded.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from oelm.errors import UserError
from oelm.system.private_transformers import hub_file

INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
PLAIN = re.compile(r"[^/\\\x00]+\.safetensors")


def check_weights(name: str, hub: Mapping[str, Any], weights: Any = None) -> None:
    """Refuse a checkpoint if loading it would read anything but its own safetensors.

    `hub` says where it is; `weights` is the file that its config names, if it names one.
    """
    if Path(name).is_file():
        raise UserError(f"{name} is a file: name the folder of a model")
    if weights is not None and not _is_plain(weights, ".index.json"):
        raise UserError(
            f"{name}: config.json names the weights {weights!r}, which are no safetensors of its own"
        )
    _refuse_pickles(_folder(name, hub), name)
    if any(True for _ in _files(name, ADAPTER, hub)):
        raise UserError(f"{name} holds an adapter ({ADAPTER}): merge it into its model, and save that")
    index = weights if weights is not None and weights.endswith(".json") else INDEX
    for path in _files(name, index, hub):
        _check_index(name, path)
    _refuse_integers(_folder(name, hub), name)


def quantised(name: str, why: str) -> UserError:
    return UserError(f"{name} is quantised ({why}): use the full-precision model, and quantise it afterwards")


def _is_plain(file: Any, ending: str = "") -> bool:
    """Whether this is the name of a safetensors file in the checkpoint's own folder."""
    return isinstance(file, str) and PLAIN.fullmatch(file.removesuffix(ending)) is not None


def _folder(name: str, hub: Mapping[str, Any]) -> Path:
    return Path(name, hub.get("subfolder") or "")


def _files(name: str, file: str, hub: Mapping[str, Any]) -> Iterator[Path]:
    """The file of that name, if the checkpoint has it; in a folder, also the indices of its variants."""
    if Path(name).is_dir():
        pattern = f"{file.removesuffix('.json')}*.json" if file.endswith(".index.json") else file
        yield from sorted(_folder(name, hub).glob(pattern))
    elif (path := hub_file(name, file, hub)) is not None:
        yield path


def _check_index(name: str, path: Path) -> None:
    try:
        if not path.is_file():
            raise OSError
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{name}: {path.name} is not the index of a checkpoint; save the model again"
        ) from None
    for file in files:
        if not _is_plain(file):
            raise UserError(
                f"{name}: {path.name} names {file!r}, which is not a safetensors file of that folder: "
                "nothing else is read, since a pickle can run code"
            )


def _refuse_pickles(folder: Path, name: str) -> None:
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt"):
        for path in folder.glob(pattern):
            raise UserError(
                f"{name} has its weights in {path.name} only, a pickle, which can run code when it is read: "
                "save the model as safetensors where you trust it"
            )


def _refuse_integers(folder: Path, name: str) -> None:
    """Refuse integer weights, even where the config mentions no quantisation. Buffers may be integers."""
    for path in sorted(folder.glob("*.safetensors")):
        if not path.is_file():
            raise UserError(f"{path} is not a file; save the model again")
        try:
            with safe_open(path, framework="pt") as file:
                kinds = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return  # loading it will say what is wrong
        for key, kind in kinds.items():
            if key.endswith(".weight") and not kind.startswith(("F", "BF")):
                raise quantised(name, f"{key} is stored as {kind}")
