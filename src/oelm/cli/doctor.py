"""The verb doctor: versions and devices of this machine, and the fast paths that run on it."""

import json
from typing import Any

from oelm.cli import options
from oelm.system.terminal import say


def doctor(as_json: options.AsJson = False) -> None:
    """Versions, devices, and which fast paths each device has, or why not.

    Example: oelm doctor
    """
    import torch

    from oelm.training.folder import environment
    from oelm.training.resolve import resolve_precision
    from oelm.training.step import speed_package

    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    speed, devices = speed_package(), []
    for device in map(torch.device, [*names, "cpu"]):
        entry: dict[str, Any] = {"device": str(device), "precision": resolve_precision("auto", device)[0]}
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
            entry |= {"name": properties.name, "memory_bytes": properties.total_memory}
            entry["compute_capability"] = capability
        entry["why_not"] = None if speed is None else speed.why_not(device)
        devices.append(entry)
    record = environment(torch.device(names[0] if names else "cpu"), 1) | {"devices": devices}
    say(json.dumps(record) if as_json else _text(record))
    if not as_json:
        say("\nnext     oelm demo (some minutes); oelm train --data my.csv --text body --label topic")


def _text(record: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    lines = [
        f"oelm {record['oelm']}, Python {record['python']}, {record['platform']}",
        packages,
        record["cpu"],
    ]
    for device in record["devices"]:
        lines.append("")
        head = f"{device['device']}: {device['precision']} by default"
        if "name" in device:
            head += f"; {device['name']}, {device['memory_bytes'] / 1e9:.0f} GB, "
            head += f"compute capability {device['compute_capability']}"
        lines.append(head)
        if device["why_not"] is None:
            lines.append("  speed/ is not installed: the plain path")
        for path, why in (device["why_not"] or {}).items():
            lines.append(f"  {path.replace('_', ' '):<14} {f'no: {why}' if why else 'yes'}")
    return "\n".join(lines)
