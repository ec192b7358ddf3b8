"""How a transfer fails."""

from __future__ import annotations


class KvTransferError(Exception):
    """The transfer broke, took too long or was refused; the message says which."""


class KvIdentityError(KvTransferError):
    """Other blocks came than those that were asked for."""
