"""Plugins: task kinds, model families, methods and launchers from outside the package (docs/extending.md).

A plugin is a module that adds to a `Registry` when it is imported. It is either installed, with an entry
point in the group "oelm.plugins", or named by `--plugin module` or `plugins = ["module"]` in a TOML file.
"""

import functools
import importlib
import os
import sys
from collections import UserDict
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from oelm.errors import UserError

T = TypeVar("T")


class Registry(UserDict[str, T]):
    """The entries of one kind, such as methods, by name. A built-in entry may be written "module:attribute",
    which is imported when it is first used. On an unknown name the installed plugins are loaded."""

    def __init__(self, what: str, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self.what = what

    def add(self, name: str, entry: T) -> None:
        """Add a plugin's entry; UserError if the name is taken."""
        if name in self.data:
            raise UserError(
                f"there is a {self.what} {name!r} already; a plugin must give its own another name"
            )
        self[name] = entry

    def find(self, name: str) -> T:
        """The entry of that name; UserError with the known names if there is none."""
        if name not in self:
            known = ", ".join(self)
            raise UserError(f"unknown {self.what} {name!r}; known: {known}; those of a plugin need --plugin")
        return self[name]

    def __getitem__(self, name: str) -> T:
        if name not in self:
            raise KeyError(name)
        entry = self.data[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self[name] = getattr(importlib.import_module(module), attribute)
        return entry

    def __contains__(self, name: object) -> bool:
        if name not in self.data:
            load_installed()
        return name in self.data


def load_plugins(modules: Iterable[str]) -> None:
    """Import plugins by the names of their modules, which are installed or in the current folder."""
    for name in modules:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last, so that it does not hide an installed package
        try:
            importlib.import_module(name)
        except UserError as error:
            raise UserError(f"plugin {name!r}: {error}") from None
        except Exception as error:  # a plugin's code may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"plugin {name!r} cannot be imported ({reason}); a plugin is the name of a module that is "
                "installed, on PYTHONPATH or in the current folder"
            ) from None


@functools.cache
def load_installed() -> None:
    load_plugins(point.module for point in entry_points(group="oelm.plugins"))
