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
class RunningRequest:
    """What is kept of a request besides the engine's state: its identity, and how its answer could be
    read."""

    request_id: str
    frontend_id: str
    epoch: int
    traceparent: str = ""
    pace: AnswerPace = field(default_factory=_pace, compare=False)


class RunningRequests:
    """Track requests from submission or adoption until they end here. Touched a few times in a request's
    life."""

    def __init__(self, reading_s: Callable[[], float] = _default_reading_s) -> None:
        """`reading_s`: the users' reading pace in seconds per token. An answer keeps the pace at its
        request's arrival."""
        self._reading_s = reading_s
        self._by_key: dict[RequestKey, RunningRequest] = {}
        self._by_id: dict[str, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(
        self, key: RequestKey, request_id: str, frontend_id: str, epoch: int, traceparent: str = ""
    ) -> RunningRequest:
        """Add a request."""
        request = RunningRequest(request_id, frontend_id, epoch, traceparent, AnswerPace(self._reading_s()))
        self.remove(key)
        self._by_key[key] = self._by_id[request_id] = request
        return request

    def items(self) -> Iterator[tuple[RequestKey, RunningRequest]]:
        """Iterate over all requests."""
        return iter(list(self._by_key.items()))

    def get(self, key: RequestKey) -> RunningRequest | None:
        """Return the request with this key, or None."""
        return self._by_key.get(key)

    def by_id(self, request_id: str) -> RunningRequest | None:
        """Return the request with this id of vLLM's API server, or None."""
        return self._by_id.get(request_id)

    def remove(self, key: RequestKey) -> RunningRequest | None:
        """Remove and return a request, or return None."""
        request = self._by_key.pop(key, None)
        if request is None:
            return None
        if self._by_id.get(request.request_id) is request:
            del self._by_id[request.request_id]
        return request

    def remove_client(self, client: int) -> list[RunningRequest]:
        """Remove and return all requests of a front end whose stream ended."""
        keys = [key for key in self._by_key if key.client == client]
        return [request for key in keys if (request := self.remove(key)) is not None]
