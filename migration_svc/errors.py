"""Why a migration cannot be asked for."""

from __future__ import annotations


class UnknownInstance(Exception):
    """No such instance in the fleet; the message names field and instance."""


class BadMigration(Exception):
    """The request for a migration makes no sense; the message names the field."""
