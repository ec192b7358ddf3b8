"""The requests that this worker carries, by the front ends' names for them."""

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
    """What outlives the engine's own memory of a request: who it was, and how its answer could be read."""

    request_id: str
    frontend_id: str
    epoch: int
    traceparent: str = ""
    pace: AnswerPace = field(default_factory=_pace, compare=False)


class CarriedRequests:
    """From submission or adoption until its end here. Touched a few times in a request's life."""

    def __init__(self, reading_s: Callable[[], float] = _default_reading_s) -> None:
        """`reading_s`: the pace at which users read, in seconds a token. An answer keeps the one with which
        its request came."""
        self._reading_s = reading_s
        self._by_key: dict[RequestKey, Carried] = {}
        self._by_id: dict[str, Carried] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(
        self, key: RequestKey, request_id: str, frontend_id: str, epoch: int, traceparent: str = ""
    ) -> Carried:
        """It is here now."""
        carried = Carried(request_id, frontend_id, epoch, traceparent, AnswerPace(self._reading_s()))
        self.remove(key)
        self._by_key[key] = self._by_id[request_id] = carried
        return carried

    def items(self) -> Iterator[tuple[RequestKey, Carried]]:
        """All that are here now."""
        return iter(list(self._by_key.items()))

    def get(self, key: RequestKey) -> Carried | None:
        """Who that is."""
        return self._by_key.get(key)

    def by_id(self, request_id: str) -> Carried | None:
        """The request that vLLM's API server calls so."""
        return self._by_id.get(request_id)

    def remove(self, key: RequestKey) -> Carried | None:
        """It is here no more; who it was."""
        carried = self._by_key.pop(key, None)
        if carried is None:
            return None
        if self._by_id.get(carried.request_id) is carried:
            del self._by_id[carried.request_id]
        return carried

    def remove_client(self, client: int) -> list[Carried]:
        """All of a front end whose stream ended."""
        keys = [key for key in self._by_key if key.client == client]
        return [carried for key in keys if (carried := self.remove(key)) is not None]
