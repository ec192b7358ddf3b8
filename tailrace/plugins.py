"""Load what other packages add to Tailrace by entry points."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

_TEXT_MAX: Final = 300


class PluginError(RuntimeError):
    """An entry point cannot be loaded; the message says which object, and why."""


@lru_cache(maxsize=8)
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name.

    Cached: finding them takes tens of milliseconds, longer than a scheduler may block. After
    `plugins.cache_clear()` packages that were installed since are found.
    """
    return {point.name: point for point in entry_points(group=group)}


def load_plugin(point: EntryPoint) -> object:
    """Return what an entry point names. Raise PluginError."""
    try:
        plugin: object = point.load()
    # A third-party package may fail in any way, even by sys.exit(); the process must survive that.
    except BaseException as error:
        raise PluginError(f"({point.value}) cannot be loaded: {describe_error(error)}") from error
    return plugin


def describe_error(error: BaseException) -> str:
    """Return what a plugin raised and where, in one line, whatever the exception is."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - its text, too, comes from the plugin
        text = ""
    name = type(error).__name__
    line = " ".join(f"{name}: {text[:_TEXT_MAX]}".split()) if text else name
    where = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{line} ({where[0].filename.rpartition('/')[2]}:{where[0].lineno})" if where else line


def wrong_declaration(kind: type, tuples: Mapping[str, type], words: Iterable[str] = ()) -> str:
    """Return which attribute of a plugin's class is not a tuple of these, or not a word; empty: none."""
    for name, item in tuples.items():
        values = getattr(kind, name, None)
        if type(values) is not tuple or not all(isinstance(value, item) for value in values):
            return f"{name}: not a tuple of {item.__name__}"
    return next((f"{name}: not a str" for name in words if type(getattr(kind, name, None)) is not str), "")
