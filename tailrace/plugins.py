"""What other packages add to Tailrace by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points


class PluginError(RuntimeError):
    """An entry point cannot be loaded; the message says which object, and why."""


@lru_cache(maxsize=8)
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name.

    Remembered: looking for them takes tens of milliseconds, which is longer than a scheduler may stand still.
    `plugins.cache_clear()` has packages found that were installed since.
    """
    return {point.name: point for point in entry_points(group=group)}


def load_plugin(point: EntryPoint) -> object:
    """What an entry point names. Raises PluginError."""
    try:
        found: object = point.load()
    # Somebody else's package, which may fail in any way; the process must outlive that.
    except Exception as error:
        raise PluginError(f"({point.value}) cannot be loaded: {type(error).__name__}: {error}") from error
    return found
