"""The requests on this worker, by the front ends' keys and by id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tailrace.slo import READING_S
from worker_agent.answer_pace import AnswerPace
from worker_agent.engine.base import RequestKey


def _default_reading_s() -> float:
    return READING_S


def _pace() -> AnswerPace:
    return AnswerPace(READING_S)


@dataclass(frozen=True, slots=True)
class Carried:
    """What is kept of a request besides the engine's state: its identity, and how its answer could be
    read."""

    request_id: str
    frontend_id: str
    epoch: int
    traceparent: str = ""
    pace: AnswerPace = field(default_factory=_pace, compare=False)


class CarriedRequests:
    """Track requests from submission or adoption until they end here. Touched a few times in a request's
    life."""

    def __init__(self, reading_s: Callable[[], float] = _default_reading_s) -> None:
        """`reading_s`: the users' reading pace in seconds per token. An answer keeps the pace at its
        request's arrival."""
        self._reading_s = reading_s
        self._by_key: dict[RequestKey, Carried] = {}
        self._by_id: dict[str, Carried] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(
        self, key: RequestKey, request_id: str, frontend_id: str, epoch: int, traceparent: str = ""
    ) -> Carried:
        """Add a request."""
        carried = Carried(request_id, frontend_id, epoch, traceparent, AnswerPace(self._reading_s()))
        self.remove(key)
        self._by_key[key] = self._by_id[request_id] = carried
        return carried

    def items(self) -> Iterator[tuple[RequestKey, Carried]]:
        """Iterate over all requests."""
        return iter(list(self._by_key.items()))

    def get(self, key: RequestKey) -> Carried | None:
        """Return the request with this key, or None."""
        return self._by_key.get(key)

    def by_id(self, request_id: str) -> Carried | None:
        """Return the request with this id of vLLM's API server, or None."""
        return self._by_id.get(request_id)

    def remove(self, key: RequestKey) -> Carried | None:
        """Remove and return a request, or return None."""
        carried = self._by_key.pop(key, None)
        if carried is None:
            return None
        if self._by_id.get(carried.request_id) is carried:
            del self._by_id[carried.request_id]
        return carried

    def remove_client(self, client: int) -> list[Carried]:
        """Remove and return all requests of a front end whose stream ended."""
        keys = [key for key in self._by_key if key.client == client]
        return [carried for key in keys if (carried := self.remove(key)) is not None]
