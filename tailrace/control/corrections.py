"""What was decided and heard of one instance since its last report, and is not in that report.

The scheduler and the simulator correct an instance's last report with this same code, so that a burst of
decisions between two reports does not pile up on one instance. They differ in how they name a request (by id;
by the job itself) and in when they know that a report has a placement in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Counted:
    """A request on an instance, as the counts have it: in the last report, or added since."""

    context_tokens: int
    kv_tokens: int
    # It runs or is paused; False: it waits for a seat.
    seated: bool


@dataclass(slots=True)
class Pending:
    """A request placed on an instance that no report shows yet."""

    # Context to be prefilled, and what of it was found in the prefix cache.
    tokens: int
    cached_tokens: int
    # When it was placed: whatever the model orders placements and reports by.
    placed: float


K = TypeVar("K")
P = TypeVar("P", bound=Pending)


class Corrections(Generic[K, P]):
    """Changes to the counts of the last report; zero when a report has just come. Tokens unless named
    otherwise."""

    __slots__ = (
        "coming",
        "coming_context",
        "context_change",
        "kv_change",
        "leaving",
        "pending",
        "pending_cached_tokens",
        "pending_tokens",
        "running_change",
        "waiting_change",
    )

    def __init__(self) -> None:
        self.pending: dict[K, P] = {}
        self.pending_tokens = 0
        self.pending_cached_tokens = 0
        # Open migrations to here: the room that they will take, as far as no report counts it; and the
        # context that they bring.
        self.coming: dict[K, int] = {}
        self.coming_context: dict[K, int] = {}
        # Open migrations from here.
        self.leaving: set[K] = set()
        self.forget_changes()

    # ---- reports

    def forget_changes(self) -> None:
        """A new report has them. Placements and migrations stay until that report shows them."""
        self.running_change = 0
        self.waiting_change = 0
        self.context_change = 0
        self.kv_change = 0

    def counts(
        self, running: int, waiting: int, context_tokens: int, kv_tokens: int
    ) -> tuple[int, int, int, int]:
        """The same four counts of the last report, corrected; none is less than 0."""
        running += self.running_change
        waiting += self.waiting_change
        context_tokens += self.context_change + self.pending_tokens
        kv_tokens += self.kv_change
        if self.coming:
            kv_tokens += sum(self.coming.values())
        return (
            running if running > 0 else 0,
            (waiting if waiting > 0 else 0) + len(self.pending),
            context_tokens if context_tokens > 0 else 0,
            kv_tokens if kv_tokens > 0 else 0,
        )

    # ---- placements

    def add_pending(self, key: K, pending: P) -> None:
        """The request was placed here. It must not be pending already."""
        self.pending[key] = pending
        self.pending_tokens += pending.tokens
        self.pending_cached_tokens += pending.cached_tokens

    def remove_pending(self, key: K) -> P | None:
        """The request has begun, or has gone, or a report shows it; None: it was not pending."""
        pending = self.pending.pop(key, None)
        if pending is not None:
            self.pending_tokens -= pending.tokens
            self.pending_cached_tokens -= pending.cached_tokens
        return pending

    # ---- requests on the instance

    def add_request(self, key: K, request: Counted) -> None:
        """The request is here, and the counts do not have it. KV that was set aside for its migration, and
        that a report shows, is not counted again."""
        self._count_seat(request, 1)
        self.context_change += request.context_tokens
        reserved = self.coming.get(key)
        if reserved != 0:
            self.kv_change += request.kv_tokens
        if reserved is not None:
            self.coming[key] = 0

    def change_request(self, before: Counted, after: Counted) -> None:
        """A request that the counts have is now so. Its KV stays as it was counted until the next report."""
        self._count_seat(before, -1)
        self._count_seat(after, 1)
        self.context_change += after.context_tokens - before.context_tokens

    def remove_request(self, request: Counted) -> None:
        """A request that the counts have has gone."""
        self._count_seat(request, -1)
        self.context_change -= request.context_tokens
        self.kv_change -= request.kv_tokens

    def _count_seat(self, request: Counted, by: int) -> None:
        if request.seated:
            self.running_change += by
        else:
            self.waiting_change += by

    # ---- migrations

    def open_arrival(self, key: K, kv_tokens: int, context_tokens: int) -> None:
        """A migration of the request to here was opened: it will need the room."""
        self.coming[key] = kv_tokens
        self.coming_context[key] = context_tokens

    def open_departure(self, key: K) -> None:
        """A migration of the request from here was opened."""
        self.leaving.add(key)

    def close_migration(self, key: K) -> None:
        """The migration of the request, to here or from here, is over."""
        self.coming.pop(key, None)
        self.coming_context.pop(key, None)
        self.leaving.discard(key)
