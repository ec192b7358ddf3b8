"""Load what other packages add to Tailrace by entry points."""

from __future__ import annotations

import importlib
import logging
import traceback
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import TracebackType
from typing import Final

from tailrace.bounded import printable

log = logging.getLogger(__name__)

_TEXT_MAX: Final = 300
# Frames of a traceback among which the plugin's own is looked for; an endless recursion has a thousand.
_FRAMES_MAX: Final = 20
_OURS: Final = f"{Path(__file__).parent}/"
# Code without a file, such as a dataclass's constructor, and what imports.
_PASSED_OVER: Final = ("<", f"{Path(importlib.__file__).parent}/", __file__)


class PluginError(RuntimeError):
    """An entry point cannot be loaded; the message says which object, and why."""


@lru_cache(maxsize=8)
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name.

    Cached: finding them takes tens of milliseconds, longer than a scheduler may block. After
    `plugins.cache_clear()` packages that were installed since are found. A name of Tailrace's own is no other
    package's; of others that have the same, the first by what it names is used, on every host.
    """
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda each: (not _is_own(each), each.value)):
        used = found.setdefault(point.name, point)
        if used.value != point.value:
            log.warning("%s %r: %s is used, not %s", group, point.name, used.value, point.value)
    return found


def _is_own(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == "tailrace"


def load_plugin(point: EntryPoint) -> object:
    """Return what an entry point names. Raise PluginError."""
    try:
        plugin: object = point.load()
    # A third-party package may fail in any way, even by sys.exit(); the process must survive that.
    except BaseException as error:
        reason = describe_error(error)
        if isinstance(error, ModuleNotFoundError):
            reason += "; if installed in place (pip install -e), it is found after a restart of this process"
        raise PluginError(f"({point.value}) cannot be loaded: {reason}") from error
    return plugin


def describe_error(error: BaseException) -> str:
    """Return what a plugin raised and where in it, in one printable line, whatever the exception is."""
    try:
        text = str(error)[:_TEXT_MAX]
        name = type(error).__name__
        line = " ".join(f"{name}: {text}".split()) if text else name
        return printable(line + _where(error.__traceback__))
    except BaseException:  # noqa: BLE001 - its text and its class come from the plugin, too
        return "an exception that cannot be shown"


def _where(trace: TracebackType | None) -> str:
    """Return the last line outside this package, else the last line."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace, limit=-_FRAMES_MAX)
        if not frame.filename.startswith(_PASSED_OVER)
    ]
    if not frames:
        return ""
    own = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    last = (own or frames)[-1]
    return f" ({last.filename.rpartition('/')[2]}:{last.lineno})"


def wrong_declaration(kind: type, tuples: Mapping[str, type], words: Iterable[str] = ()) -> str:
    """Return which attribute of a plugin's class is not a tuple of these, or not a word; empty: none."""
    for name, item in tuples.items():
        values = getattr(kind, name, None)
        if type(values) is not tuple or not all(isinstance(value, item) for value in values):
            return f"{name}: not a tuple of {item.__name__}"
    return next((f"{name}: not a str" for name in words if type(getattr(kind, name, None)) is not str), "")
