"""Why a request ends without an answer: what `frontend_svc` tells the API server of it.

vLLM passes an output's stop_reason through untouched, and on an error output nobody else sets one: the
HTTP status and the message travel there. The Python API server answers with them in OpenAI's shape;
vLLM's Rust API server knows errors without reasons alone, and answers 500.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

_PREFIX: Final = "tailrace:"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An HTTP status and a message for the user."""

    status: int
    message: str

    def encode(self) -> str:
        """As a stop_reason."""
        return f"{_PREFIX}{self.status}:{self.message}"

    @classmethod
    def decode(cls, stop_reason: int | str | None) -> Self | None:
        """None: a stop_reason of somebody else."""
        if not isinstance(stop_reason, str) or not stop_reason.startswith(_PREFIX):
            return None
        status, colon, message = stop_reason.removeprefix(_PREFIX).partition(":")
        return cls(int(status), message) if colon and status.isdigit() else None


NO_INSTANCE: Final = Refusal(503, "No instance can take this request now.")
"""Nothing in the fleet can take the request; later it may."""

TOO_MANY_REQUESTS: Final = Refusal(429, "This server carries as many requests as it may; try again later.")
"""The front end's own bound."""
