"""Imports that wait for room on an engine, first come, first served (Arrow, section 5.4)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from worker_agent.engine.base import RequestKey
from worker_agent.engine.errors import EngineRefusal, NoRoom

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    key: RequestKey
    reserve: Callable[[], None]
    done: Callable[[EngineRefusal | None], None]


class ImportQueue:
    """One engine's queue, bounded by the worker's limit on concurrent imports. All calls on the engine's own
    thread."""

    def __init__(self) -> None:
        # By request ID, in order of arrival.
        self._waiting: dict[str, _Waiting] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        request_id: str,
        key: RequestKey,
        reserve: Callable[[], None],
        done: Callable[[EngineRefusal | None], None],
    ) -> None:
        """Append an import. `reserve` raises NoRoom while there is no room; `done` is called exactly once,
        with None after `reserve` succeeded."""
        self._waiting[request_id] = _Waiting(key, reserve, done)

    def admit(self) -> None:
        """Reserve room for imports in order, until one finds none. Call between two steps."""
        while self._waiting:
            request_id, first = next(iter(self._waiting.items()))
            refusal: EngineRefusal | None = None
            try:
                first.reserve()
            except NoRoom:
                # Smaller imports behind it must not overtake, or a large one would starve.
                return
            except EngineRefusal as error:
                refusal = error.with_traceback(None)
            # The engine's loop calls this: one import must not end the engine.
            except Exception as error:  # noqa: BLE001
                _log.exception("the import of %s failed", request_id)
                refusal = EngineRefusal(f"it failed: {error}")
            del self._waiting[request_id]
            first.done(refusal)

    def remove(self, request_id: str) -> None:
        """Remove an import, which is refused; unknown ones are ignored."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.done(EngineRefusal(f"the import of {request_id} was dropped while it waited for room"))

    def remove_key(self, key: RequestKey) -> None:
        """Remove the import with this key, if any."""
        for request_id in [name for name, waiting in self._waiting.items() if waiting.key == key]:
            self.remove(request_id)

    def remove_client(self, client: int) -> None:
        """Remove all imports for this front end."""
        for request_id in [name for name, waiting in self._waiting.items() if waiting.key.client == client]:
            self.remove(request_id)

    def clear(self) -> None:
        """Remove all imports, because the engine stops."""
        for request_id in list(self._waiting):
            self.remove(request_id)
