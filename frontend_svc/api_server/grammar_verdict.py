"""What is said about a grammar, and the bounds within which it must compile."""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

CPU_S: Final = 10
"""CPU time of one grammar. With xgrammar 0.2.8 and a vocabulary of 128,000, a schema of 500 properties takes
2 s, and strings of up to 1,000 characters 6 s. A worker takes as long again, on a thread that nothing
stops."""
MEMORY_BYTES: Final = 1 << 30
"""Address space of one grammar, besides that of the process. Schemas like these take 120 MiB."""
STACK_BYTES: Final = 4 << 20
"""Half of what a worker's thread has, so that what compiles here does not overflow there."""
CHECK_S: Final = 12.0 * CPU_S
"""Longest check, for a machine whose CPUs are busy."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a grammar may be used; `status`: 0, or that of the refusal."""

    status: int = 0
    message: str = ""
    # Fields of StructuredOutputsParams that vLLM's validation sets.
    changes: dict[str, object] = field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        """Return whether another check would say the same."""
        return self.status != HTTPStatus.SERVICE_UNAVAILABLE


INVALID: Final = int(HTTPStatus.UNPROCESSABLE_ENTITY)
"""Status for what vLLM refuses; its own error has another."""
TOO_LARGE: Final = int(HTTPStatus.BAD_REQUEST)

LATE: Final = Verdict(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "The grammar of this request's structured output could not be checked in time.",
)


def too_large(exceeded: str) -> Verdict:
    """Return the refusal of a grammar that takes more than this to compile."""
    message = f"The grammar of this request's structured output takes more than {exceeded} to compile."
    return Verdict(TOO_LARGE, message)
