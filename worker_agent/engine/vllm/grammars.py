"""Wait for grammars, which vLLM compiles on its own threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.request import Request

from worker_agent.engine.errors import EngineRefusal

_DEADLINE_S = 20.0
_POLL_S = 0.005

Finish = Callable[[EngineRefusal | None], None]


@dataclass(frozen=True, slots=True)
class _Wait:
    request: Request
    finish: Finish
    deadline_s: float


class Grammars:
    """Requests whose output tokens can only be appended after their grammar is compiled. Engine thread
    only."""

    def __init__(self) -> None:
        self._waits: list[_Wait] = []

    def when_ready(self, request: Request, finish: Finish) -> None:
        """Call `finish` with None once the grammar is compiled, at once if there is none, or with a refusal
        when that fails or takes more than 20 s."""
        wait = _Wait(request, finish, time.monotonic() + _DEADLINE_S)
        if not self._try_finish(wait):
            self._waits.append(wait)

    def poll(self) -> float | None:
        """Finish the requests whose grammar is ready or late. Return the seconds until the next poll, or None
        if no request waits."""
        if not self._waits:
            return None
        waits, self._waits = self._waits, []
        self._waits.extend(wait for wait in waits if not self._try_finish(wait))
        return _POLL_S if self._waits else None

    def _try_finish(self, wait: _Wait) -> bool:
        structured = wait.request.structured_output_request
        if structured is None:
            wait.finish(None)
        elif isinstance(structured.grammar, Exception):
            wait.finish(EngineRefusal(f"its grammar does not compile: {structured.grammar}"))
        elif structured.grammar is not None:
            wait.finish(None)
        elif time.monotonic() > wait.deadline_s:
            wait.finish(EngineRefusal(f"its grammar did not compile within {_DEADLINE_S:.0f} s"))
        else:
            return False
        return True
