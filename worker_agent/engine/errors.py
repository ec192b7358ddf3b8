"""Exceptions raised by engines."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=Exception)


class EngineRefusal(Exception):
    """The engine cannot do this now; the message says why (unknown request, no room, preempted, ...)."""


class Unrunnable(EngineRefusal):
    """No engine of this model can run the request, now or later: the request is at fault, or asks for what
    such engines do not do."""


class Gone(EngineRefusal):
    """The request is not on this engine (any more): it has finished, was aborted, or has moved."""


class NoRoom(EngineRefusal):
    """There is no room for an import: not enough free KV, or no free slot in the batch."""


class KvCorrupt(Exception):
    """A block's content does not match its checksum or name; the message names the block."""


class EngineSettingError(RuntimeError):
    """The engine cannot run with these settings; the message is one line that names the setting."""


def raised_anew(error: E) -> E:
    """Return an equal error to raise in place of one that a future keeps.

    The kept one loses its frames: they have the future, which would be a circle with all that they hold.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return type(error)(*error.args)
