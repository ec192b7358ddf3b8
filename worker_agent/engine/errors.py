"""Exceptions raised by engines."""

from __future__ import annotations


class EngineRefusal(Exception):
    """The engine cannot do this now; the message says why (unknown request, no room, preempted, ...)."""


class NoRoom(EngineRefusal):
    """There is no room for an import: not enough free KV, or no free slot in the batch."""


class KvCorrupt(Exception):
    """A block's content does not match its checksum or name; the message names the block."""


class EngineSettingError(RuntimeError):
    """The engine cannot run with these settings; the message is one line that names the setting."""
