"""Load what other packages add to Tailrace by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points


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
    # A third-party package may fail in any way; the process must survive that.
    except Exception as error:
        raise PluginError(f"({point.value}) cannot be loaded: {type(error).__name__}: {error}") from error
    return plugin
