"""How a run's log reaches the API server: what each engine request has already, and what goes out next."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from frontend_svc.answers.book import Answer, Entry
from frontend_svc.streams import FINISHED


@dataclass(frozen=True, slots=True)
class Progress:
    """What an engine request of a run begins with: the tokens that it has, and what they told of it."""

    token_ids: array[int]
    # All flags that were told.
    flags: int
    # As in Stream.
    model: str

    @property
    def finished(self) -> bool:
        """Its engine has said its last."""
        return bool(self.flags & FINISHED)


def progress_of(answer: Answer, part: str) -> Progress:
    """Of one engine request, by the log."""
    token_ids, flags, model = array("I"), 0, ""
    for entry in answer.entries:
        if entry.part == part:
            token_ids.extend(entry.token_ids)
            flags |= entry.flags
            model = model or entry.model
    return Progress(token_ids, flags, model)


class Delivery:
    """One run's way through its answer's log: entries go to the API server in the log's order, each once its
    engine request is there, and once a second front end has it.

    Requests that run together (`n`) are told in the order in which they were first: so vLLM makes of the same
    log the same events.
    """

    def __init__(self, answer: Answer, arrival: int = 0) -> None:
        """`arrival`: counts the requests of this front end."""
        self.answer = answer
        self.run = answer.run
        self.arrival = arrival
        # Entries that were told, and that may be.
        self.told = 0
        self.released = 0
        # vLLM's internal request id of each engine request, and the handles of streams.
        self.names: dict[str, str] = {}
        self.handles: dict[str, int] = {}

    @property
    def current(self) -> bool:
        """Whether no later run has begun."""
        return self.run == self.answer.run and self.answer.serves

    def due(self) -> Iterator[tuple[str, Entry]]:
        """Entries to tell now, each with its engine request; they count as told. Notes are passed over: they
        are for who runs it again."""
        entries = self.answer.entries
        while self.told < self.released:
            entry = entries[self.told]
            if entry.part and entry.part not in self.names:
                return
            self.told += 1
            if entry.part:
                yield entry.part, entry
