"""Why a migration cannot be asked for."""

from __future__ import annotations


class UnknownInstance(Exception):
    """No such instance in the fleet; the message names field and instance."""


class BadMigration(Exception):
    """The request for a migration makes no sense; the message names the field."""


class Stopping(Exception):
    """This service finishes what is under way and begins nothing more."""

    def __init__(self) -> None:
        super().__init__("this migration service is stopping")
