"""Deliver a run's log to the API server: what each engine request has already, and what it gets next."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from frontend_svc.answers.store import KeptAnswer, LogEntry
from frontend_svc.streams import FINISHED


@dataclass(frozen=True, slots=True)
class LoggedProgress:
    """What an engine request of a run starts with: its tokens so far and their flags."""

    token_ids: array[int]
    # All flags reported so far.
    flags: int
    # Model key as in Stream.
    model: str

    @property
    def finished(self) -> bool:
        """Return whether its last output is in the log."""
        return bool(self.flags & FINISHED)


def progress_of(answer: KeptAnswer, part: str) -> LoggedProgress:
    """Return the progress of one engine request according to the log."""
    token_ids, flags, model = array("I"), 0, ""
    for entry in answer.entries:
        if entry.part == part:
            token_ids.extend(entry.token_ids)
            flags |= entry.flags
            model = model or entry.model
    return LoggedProgress(token_ids, flags, model)


class Delivery:
    """Deliver one run's log in order, each entry once its engine request exists and the second front end has
    it.

    Requests that run together (`n` > 1) are delivered in their original order, so that vLLM makes the same
    events of the same log.
    """

    def __init__(self, answer: KeptAnswer, arrival: int = 0) -> None:
        """`arrival`: number of the HTTP request, in order of arrival at this front end."""
        self.answer = answer
        self.run = answer.run
        self.arrival = arrival
        # Number of entries delivered, and number that may be delivered.
        self.delivered = 0
        self.released = 0
        # vLLM's internal request id and the stream handle of each engine request.
        self.request_ids: dict[str, str] = {}
        self.handles: dict[str, int] = {}

    @property
    def current(self) -> bool:
        """Return whether no later run has begun."""
        return self.run == self.answer.run and self.answer.served_here

    def take_due(self) -> Iterator[tuple[str, LogEntry]]:
        """Yield the entries to deliver now, each with its engine request, and count them as delivered.

        Notes are skipped: they are for the next run.
        """
        entries = self.answer.entries
        while self.delivered < self.released:
            entry = entries[self.delivered]
            if entry.part and entry.part not in self.request_ids:
                return
            self.delivered += 1
            if entry.part:
                yield entry.part, entry
