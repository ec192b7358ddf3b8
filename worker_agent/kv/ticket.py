"""Tickets: the right to read one export's blocks.

The source creates a ticket for each migration and gives it to the target over the migration's gRPC stream.
UCX delivers a message to the receive with its 64-bit tag, regardless of the connection; so every message of a
transfer has its own tag, derived from the ticket and used once. A sender without the ticket cannot address a
message to a transfer, and a late message matches no receive.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

_BYTES: Final = 32
_REQUEST, _HEADER, _DATA, _GOODBYE = range(4)


@dataclass(frozen=True, slots=True, repr=False)
class Ticket:
    """A secret shared by source and target."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != _BYTES:
            raise ValueError(f"a ticket has {_BYTES} bytes, not {len(self.secret)}")

    @classmethod
    def fresh(cls) -> Ticket:
        """Create a ticket from the system's randomness."""
        return cls(secrets.token_bytes(_BYTES))

    def request(self, number: int) -> int:
        """Return the tag of the target's request of this number."""
        return self._tag(_REQUEST, number)

    def header(self, chunk: int) -> int:
        """Return the tag of a chunk's header."""
        return self._tag(_HEADER, chunk)

    def data(self, chunk: int) -> int:
        """Return the tag of a chunk's blocks."""
        return self._tag(_DATA, chunk)

    def goodbye(self) -> int:
        """Return the tag of the source's message that the export has ended."""
        return self._tag(_GOODBYE, 0)

    def _tag(self, kind: int, number: int) -> int:
        message = struct.pack("<BQ", kind, number)
        return int.from_bytes(blake2b(message, key=self.secret, digest_size=8).digest(), "little")
