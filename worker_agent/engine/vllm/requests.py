"""The requests that this engine runs, by id and by key. Owned by the engine thread."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from vllm.v1.request import Request

from tailrace.lengths import limited, tokens_left
from worker_agent.engine.base import Frames, RequestKey
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.turns import Turn, arrival_order
from worker_agent.engine.vllm.pace import Pace
from worker_agent.engine.vllm.phases import PhaseTracker


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """With `generated` output tokens made, `remaining` were predicted to come."""

    generated: int
    remaining: float

    def remaining_at(self, emitted: int) -> float:
        """What is left of it when `emitted` have been made: it counts down, to 0, until it is made anew."""
        return max(0.0, self.remaining - max(0, emitted - self.generated))


@dataclass(slots=True)
class Entry:
    """One request. `emitted`: output tokens the front end has or will have from here or from elsewhere."""

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
    # Of the adapter that it runs with; empty: with none, or one whose files cannot be told apart.
    adapter_version: str = ""

    def max_output_tokens(self, max_model_len: int) -> int:
        """Return how many output tokens the request may generate on an engine with this context length."""
        room: int = max_model_len - self.request.num_prompt_tokens
        asked: int = self.request.max_tokens
        return max(0, min(room, asked))

    def predicted_remaining(self, max_model_len: int) -> float | None:
        """Predicted output tokens still to come, no more than may come; None: nothing was predicted."""
        prediction = self.prediction
        if prediction is None:
            return None
        left = tokens_left(
            self.request.num_prompt_tokens, self.emitted, self.request.max_tokens, max_model_len
        )
        return limited(prediction.remaining_at(self.emitted), left)


class RequestTable:
    """Entries by request id and by key, kept in step."""

    def __init__(self) -> None:
        self._by_id: dict[str, Entry] = {}
        self._by_key: dict[RequestKey, Entry] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Entry]:
        # One step under the GIL, so that the event loop can take a look while the engine thread works.
        return iter(list(self._by_id.values()))

    @property
    def has_prompts(self) -> bool:
        """Whether a request has not made an output token yet."""
        return any(entry.emitted == 0 for entry in self._by_id.values())

    def new_turn(self, request: Request, queue_s: float = 0.0) -> Turn:
        """A place in the order of this instance. `queue_s`: what a prompt that comes finds (JobView)."""
        return Turn(arrival_order(request.arrival_time, next(self._numbers)), queue_s)

    def add(self, entry: Entry) -> None:
        """Take a request whose id and key are not in the table."""
        self._by_id[entry.request_id] = entry
        self._by_key[entry.key] = entry

    def get(self, request_id: str) -> Entry | None:
        """The request of this id."""
        return self._by_id.get(request_id)

    def known(self, request_id: str) -> Entry:
        """The same. Raises EngineRefusal when it is not here."""
        entry = self._by_id.get(request_id)
        if entry is None:
            raise EngineRefusal(f"request {request_id} is not on this engine")
        return entry

    def by_key(self, key: RequestKey) -> Entry | None:
        """The request of this key."""
        return self._by_key.get(key)

    def remove(self, entry: Entry) -> None:
        """Forget a request; ignored when it is not there."""
        if self._by_id.get(entry.request_id) is entry:
            del self._by_id[entry.request_id]
        if self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]
