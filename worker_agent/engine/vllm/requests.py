"""The requests that this engine runs, by ID and by key, and those that wait for their grammars. Owned by the
engine thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from vllm.v1.request import Request

from tailrace.intra.base import JobView
from tailrace.perf.remaining import limited, tokens_left
from worker_agent.engine.base import Frames, RequestKey
from worker_agent.engine.errors import EngineRefusal, Gone, Unrunnable
from worker_agent.engine.turns import Turn, arrival_order, view_of
from worker_agent.engine.vllm.phases import PhaseTracker

# Weight of the latest interval between tokens in its average.
_SMOOTHING: Final = 0.1


class Pace:
    """One request's token interval, an exponential moving average."""

    __slots__ = ("_last_s", "interval_ms")

    def __init__(self, interval_ms: float = 0.0) -> None:
        """`interval_ms` is the source's measurement for an imported request; 0: unknown."""
        self.interval_ms = interval_ms
        self._last_s = 0.0

    def add(self, now_s: float, tokens: int) -> float:
        """Record tokens of one step at `now_s` (monotonic). Return the milliseconds since the last ones, per
        token; 0 for the first ones here."""
        last_s, self._last_s = self._last_s, now_s
        if last_s == 0.0:
            return 0.0
        interval_ms = (now_s - last_s) * 1000 / tokens
        if self.interval_ms == 0.0:
            self.interval_ms = interval_ms
        else:
            self.interval_ms += (1.0 - (1.0 - _SMOOTHING) ** tokens) * (interval_ms - self.interval_ms)
        return interval_ms


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """After `generated` output tokens, `remaining` more were predicted."""

    generated: int
    remaining: float

    def remaining_at(self, emitted: int) -> float:
        """Return the prediction after `emitted` tokens: it counts down to 0 until the next one is made."""
        return max(0.0, self.remaining - max(0, emitted - self.generated))


@dataclass(slots=True)
class VllmRequest:
    """One request. `emitted` counts the output tokens sent to the front end by this engine or earlier
    ones."""

    key: RequestKey
    request_id: str
    epoch: int
    frames: Frames
    frontend_id: str
    traceparent: str
    request: Request
    phases: PhaseTracker
    pace: Pace
    emitted: int
    turn: Turn
    # Set by the predictor's thread.
    prediction: LengthPrediction | None = None
    # Version of the adapter that the request runs with; empty: no adapter, or its version is unknown.
    adapter_version: str = ""
    # vLLM's count of its preemptions, when last compared (`OutputWriter`).
    preemptions: int = 0

    @property
    def view(self) -> JobView:
        """The request as an intra-instance policy sees it."""
        return view_of(
            self.turn,
            self.phases.reasons,
            self.request.num_prompt_tokens,
            self.request.num_output_tokens,
            self.phases.reasoning_tokens,
        )

    def max_output_tokens(self, max_model_len: int) -> int:
        """Return how many output tokens the request may generate on an engine with this context length."""
        room: int = max_model_len - self.request.num_prompt_tokens
        asked: int = self.request.max_tokens
        return max(0, min(room, asked))

    def predicted_remaining(self, max_model_len: int) -> float | None:
        """Return the predicted remaining output tokens, limited by what is allowed; None if not predicted."""
        prediction = self.prediction
        if prediction is None:
            return None
        left = tokens_left(
            self.request.num_prompt_tokens, self.emitted, self.request.max_tokens, max_model_len
        )
        return limited(prediction.remaining_at(self.emitted), left)


class VllmRequests:
    """Entries, indexed by request ID and by key."""

    def __init__(self) -> None:
        self._by_id: dict[str, VllmRequest] = {}
        self._by_key: dict[RequestKey, VllmRequest] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[VllmRequest]:
        # Copying is atomic under the GIL, so the event loop can iterate while the engine thread runs.
        return iter(list(self._by_id.values()))

    @property
    def has_prompts(self) -> bool:
        """Whether any request has not generated an output token yet."""
        return any(entry.emitted == 0 for entry in self._by_id.values())

    def new_turn(self, request: Request, queue_s: float = 0.0) -> Turn:
        """Create a request's place in this instance's order. `queue_s` is as in JobView."""
        return Turn(arrival_order(request.arrival_time, next(self._numbers)), queue_s)

    def add(self, entry: VllmRequest) -> None:
        """Add a request whose ID and key are not in the table."""
        self._by_id[entry.request_id] = entry
        self._by_key[entry.key] = entry

    def get(self, request_id: str) -> VllmRequest | None:
        """Return the request with this ID, or None."""
        return self._by_id.get(request_id)

    def known(self, request_id: str) -> VllmRequest:
        """Return the request with this ID. Raises Gone if there is none."""
        entry = self._by_id.get(request_id)
        if entry is None:
            raise Gone(f"request {request_id} is not on this engine")
        return entry

    def by_key(self, key: RequestKey) -> VllmRequest | None:
        """Return the request with this key, or None."""
        return self._by_key.get(key)

    def remove(self, entry: VllmRequest) -> None:
        """Remove a request; ignored if it is not in the table."""
        if self._by_id.get(entry.request_id) is entry:
            del self._by_id[entry.request_id]
        if self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]


# Longer than a grammar takes that an API server has let through (frontend_svc/api_server/grammar_verdict.py).
_DEADLINE_S = 30.0
_POLL_S = 0.005

Finish = Callable[[EngineRefusal | None], None]


@dataclass(frozen=True, slots=True)
class _Wait:
    request: Request
    finish: Finish
    deadline_s: float


class Grammars:
    """Requests that wait until their grammar is compiled. Engine thread only."""

    def __init__(self) -> None:
        self._waits: list[_Wait] = []

    def when_ready(self, request: Request, finish: Finish) -> None:
        """Call `finish` with None once the grammar is compiled, at once if there is none, or with a refusal
        when that fails or takes more than 30 s."""
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
            wait.finish(GrammarInvalid(f"its grammar does not compile: {structured.grammar}"))
        elif structured.grammar is not None:
            wait.finish(None)
        elif time.monotonic() > wait.deadline_s:
            wait.finish(_late(structured._grammar))
        else:
            return False
        return True


class GrammarInvalid(EngineRefusal):
    """The request's grammar does not compile with this engine's backend."""


def _late(compiling: Future[object]) -> EngineRefusal:
    """Return the refusal of a request whose grammar is late, and compile it no more if that has not begun."""
    message = f"its grammar did not compile within {_DEADLINE_S:.0f} s"
    # One that is being compiled occupies a thread from now on, and would take one of each engine's. One that
    # waits for a thread may find one elsewhere.
    return EngineRefusal(message) if compiling.cancel() else Unrunnable(message)
