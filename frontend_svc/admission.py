"""Refusals of new requests, and how the API server learns of them.

One byte in shared memory tells the API server whether a new request can be accepted at all. It answers 503 or
429 before it starts a response; once a stream has begun, its status is 200 whatever happens. Only
`frontend_svc` knows the fleet, and asking it for every request would cost a round trip.

The reason why an accepted request ends without an answer is sent as an output's stop_reason: see `Refusal`.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

log = logging.getLogger(__name__)


_PREFIX: Final = "tailrace:"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request ends without an answer: an HTTP status and a message for the user.

    It is encoded as the stop_reason of an error output: vLLM passes that through unchanged and sets none of
    its own there. The Python API server answers with its status and message in OpenAI's format; vLLM's Rust
    API server has errors without reasons only, and answers 500.
    """

    status: int
    message: str

    def encode(self) -> str:
        """Return the refusal as a stop_reason."""
        return f"{_PREFIX}{self.status}:{self.message}"

    @classmethod
    def decode(cls, stop_reason: int | str | None) -> Self | None:
        """Parse a stop_reason; return None if it is not a refusal."""
        if not isinstance(stop_reason, str) or not stop_reason.startswith(_PREFIX):
            return None
        status, colon, message = stop_reason.removeprefix(_PREFIX).partition(":")
        return cls(int(status), message) if colon and status.isdigit() else None


class Refused(Exception):
    """A new request ends without an answer; nothing has run it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


NO_INSTANCE: Final = Refusal(503, "No instance can take this request now.")
"""No instance in the fleet can take the request now."""

STOPPING: Final = Refusal(503, "The front end stopped before the answer was complete; try again.")
"""The drain timeout, within which streams may finish, is over."""

CANNOT_GO_ON: Final = Refusal(
    503, "The answer cannot continue: no instance of the model that began it can take it."
)
"""The answer has begun, and another model must not continue it."""

NOT_SERVING: Final = Refusal(503, "This front end is starting or stopping.")
"""Users cannot connect yet, or no more."""

NOT_HANDLED: Final = Refusal(500, "The front end failed to handle this request; its log says why.")
"""An unexpected exception, which this request alone pays for."""

TOO_MANY_REQUESTS: Final = Refusal(
    429, "This server has reached its limit of concurrent requests; try again later."
)
"""The front end's own limit of requests."""

CONGESTED: Final = Refusal(503, "The fleet is too busy to deliver this answer now; try again later.")
"""Outputs are made faster than they are read, by the API server or by this front end."""

TENANT_FULL: Final = Refusal(429, "Too many requests of this key's tenant are queued; try again later.")
"""The tenant's queue is full (`--fair-backlog`)."""

NO_TURN: Final = Refusal(503, "The request waited too long in its tenant's queue; try again later.")
"""The tenant's turn did not come within the wait limit (`--place-wait`)."""

OVERLOADED: Final = Refusal(429, "This server is too busy to start this request in time; try again later.")
"""The request's first token would miss the SLO (`tailrace set slo admit=`)."""


class AdmissionState(enum.IntEnum):
    """What happens to a new request."""

    OPEN = 0
    # No instance can take it: 503.
    NO_INSTANCE = 1
    # The front end has reached its limit of requests: 429.
    FULL = 2
    # No instance can take it now: it waits for one.
    WAITING = 3

    @property
    def unready(self) -> Refusal | None:
        """Return why a load balancer should send requests elsewhere; None if it should not.

        A front end that is full works.
        """
        without_instance = self in (AdmissionState.NO_INSTANCE, AdmissionState.WAITING)
        return NO_INSTANCE if without_instance else None

    @property
    def refusal(self) -> Refusal | None:
        """Return why a new request is refused; None if it is not."""
        if self is AdmissionState.FULL:
            return TOO_MANY_REQUESTS
        return NO_INSTANCE if self is AdmissionState.NO_INSTANCE else None


class AdmissionReader:
    """Read the admission state; used by the API server."""

    def __init__(self, path: Path, protection: int = mmap.PROT_READ) -> None:
        self._map = _map(path, protection)

    def read(self) -> AdmissionState:
        """Return what happens to a new request now."""
        return AdmissionState(self._map[0])


class AdmissionFlag(AdmissionReader):
    """Write the admission state; used by `frontend_svc`. At first, requests wait for the first instance."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes([AdmissionState.WAITING]))
        super().__init__(path, mmap.PROT_READ | mmap.PROT_WRITE)
        self.path = path

    def set(self, state: AdmissionState) -> None:
        """Set what happens to new requests from now on."""
        self._map[0] = state


class Readiness:
    """Whether a load balancer should send requests to this front end, whichever API server it runs."""

    def __init__(self) -> None:
        self.serving = False
        """Whether users can connect."""
        self.admission: AdmissionReader | None = None
        # Returns the length of the model's context; 0 while no instance has said it.
        self.context_tokens: Callable[[], int] = int

    @property
    def unready(self) -> Refusal | None:
        """Return why it should not; None if it should."""
        unready = self.admission.read().unready if self.admission is not None else None
        return unready or (None if self.serving else NOT_SERVING)

    @property
    def refusal(self) -> Refusal | None:
        """Return why it would refuse a new request now; None if it would not."""
        return None if self.admission is None else self.admission.read().refusal


def _map(path: Path, protection: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR if protection & mmap.PROT_WRITE else os.O_RDONLY)
    try:
        return mmap.mmap(fd, 1, prot=protection)
    finally:
        os.close(fd)


class AdmissionGate:
    """Close admission while no instance could take a request for `patience_s`, and while the front end is
    full."""

    def __init__(self, flag: AdmissionFlag, patience_s: float, on_demand: bool = False) -> None:
        """`on_demand`: an instance is started for requests that wait, so admission stays open without one."""
        self._flag = flag
        self._patience_s = patience_s
        self._on_demand = on_demand
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = True
        self._without_instance = False
        self._full = False

    def update(self, usable: int) -> None:
        """Set how many instances could take a request now."""
        self._waiting = not (usable or self._on_demand)
        if not self._waiting:
            self.cancel()
            self._without_instance = False
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._close)
        self._apply()

    def update_full(self, full: bool) -> None:
        """Set whether the front end has reached its limit of requests."""
        if full != self._full:
            self._full = full
            log.warning("%s", "full: new requests are refused" if full else "no longer full")
            self._apply()

    def cancel(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        log.warning("no instance can take requests; new ones are refused")
        self._without_instance = True
        self._apply()

    def _apply(self) -> None:
        if self._without_instance:
            self._flag.set(AdmissionState.NO_INSTANCE)
        elif self._full:
            self._flag.set(AdmissionState.FULL)
        else:
            self._flag.set(AdmissionState.WAITING if self._waiting else AdmissionState.OPEN)
