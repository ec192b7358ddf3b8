"""Imports that wait for room on an engine, first come, first served (Arrow, section 5.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worker_agent.engine.base import RequestKey
from worker_agent.engine.errors import EngineRefusal, NoRoom


@dataclass(frozen=True, slots=True)
class _Waiting:
    key: RequestKey
    take_room: Callable[[], None]
    done: Callable[[EngineRefusal | None], None]


class ImportLine:
    """One engine's. All calls on the engine's own thread; bounded by the imports that the worker lets run."""

    def __init__(self) -> None:
        # By request id, in order of arrival.
        self._line: dict[str, _Waiting] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._line

    def __len__(self) -> int:
        return len(self._line)

    def join(
        self,
        request_id: str,
        key: RequestKey,
        take_room: Callable[[], None],
        done: Callable[[EngineRefusal | None], None],
    ) -> None:
        """Wait behind all others. `take_room` raises NoRoom while there is none; `done` is told once."""
        self._line[request_id] = _Waiting(key, take_room, done)

    def admit(self) -> None:
        """Give room to those in front until one finds none. Call between two steps."""
        while self._line:
            request_id, first = next(iter(self._line.items()))
            refusal: EngineRefusal | None = None
            try:
                first.take_room()
            except NoRoom:
                # A smaller one behind it does not slip past, or a large one would starve.
                return
            except EngineRefusal as error:
                refusal = error
            del self._line[request_id]
            first.done(refusal)

    def leave(self, request_id: str) -> None:
        """Wait no longer; who is not in the line is ignored."""
        waiting = self._line.pop(request_id, None)
        if waiting is not None:
            waiting.done(EngineRefusal(f"the import of {request_id} was dropped while it waited for room"))

    def leave_key(self, key: RequestKey) -> None:
        """The request with this key waits no longer."""
        for request_id in [name for name, waiting in self._line.items() if waiting.key == key]:
            self.leave(request_id)

    def leave_client(self, client: int) -> None:
        """No request of this front end waits any longer."""
        for request_id in [name for name, waiting in self._line.items() if waiting.key.client == client]:
            self.leave(request_id)

    def clear(self) -> None:
        """The engine stops."""
        for request_id in list(self._line):
            self.leave(request_id)
