"""One request in a simulated engine."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Iterator
from typing import Final

from tailrace.cluster import Phase
from tailrace.intra.base import JobView
from tailrace.perf.remaining import limited, tokens_left
from worker_agent.engine.base import Frames, RequestKey
from worker_agent.engine.errors import Gone
from worker_agent.engine.simulated.kv import BlockChain
from worker_agent.engine.simulated.script import Script
from worker_agent.engine.turns import Turn, arrival_order, view_of

_numbers = itertools.count()


class State(enum.Enum):
    """The state of a request on this engine."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    # Paused by its export; keeps its blocks.
    PAUSED = "paused"
    # Its KV is being received; has its blocks.
    IMPORTING = "importing"
    # Ended or dropped; it must no longer be used.
    GONE = "gone"


class Request:
    """A request's mutable state; the scheduler, the exports and the imports each change their part of it."""

    __slots__ = (
        "arrival_s",
        "blocks",
        "chain",
        "computed",
        "epoch",
        "exported_outputs",
        "finish_at",
        "frames",
        "frontend_id",
        "key",
        "length_limit",
        "logprobs",
        "outputs",
        "phase",
        "prompt",
        "reasoning_end",
        "reasons",
        "request_id",
        "script",
        "state",
        "stops",
        "submitted_s",
        "total",
        "trace_headers",
        "traceparent",
        "turn",
    )

    def __init__(
        self,
        *,
        key: RequestKey,
        request_id: str,
        epoch: int,
        frames: Frames,
        frontend_id: str,
        traceparent: str,
        prompt: list[int],
        outputs: list[int],
        script: Script,
        chain: BlockChain,
        length_at: int,
        reasons: bool,
        reasoning_end: int | None,
        logprobs: int | None,
        arrival_s: float,
        trace_headers: dict[str, str] | None,
    ) -> None:
        self.key = key
        self.request_id = request_id
        self.epoch = epoch
        self.frames = frames
        self.frontend_id = frontend_id
        self.traceparent = traceparent
        self.prompt = prompt
        self.outputs = outputs
        self.script = script
        self.stops = script.stops
        self.chain = chain
        self.length_limit = length_at + 1
        # Index of the last token, given by the length limits or the end-of-sequence token.
        self.finish_at = min(length_at, script.eos_at)
        # The model reasons, and the prompt has not ended the reasoning.
        self.reasons = reasons
        # Index of the output token that ended the reasoning.
        self.reasoning_end = reasoning_end
        self.logprobs = logprobs
        self.arrival_s = arrival_s
        self.trace_headers = trace_headers
        # Number of all tokens, and of those whose KV exists.
        self.total = len(prompt) + len(outputs)
        self.computed = 0
        self.blocks: list[int] = []
        self.state = State.WAITING
        self.turn = Turn(arrival_order(arrival_s, next(_numbers)))
        self.phase = Phase.PREFILL
        # Output tokens that the open export has reported; None: no export is open.
        self.exported_outputs: int | None = None
        # Monotonic time of submission, for the API server's metrics.
        self.submitted_s = time.monotonic()

    # ---- worker_agent.engine.step_order.Member

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt and output tokens."""
        return self.total

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens."""
        return len(self.outputs)

    @property
    def num_output_placeholders(self) -> int:
        """Return 0, because a step begins only after the previous one has ended."""
        return 0

    @property
    def num_computed_tokens(self) -> int:
        """Return the tokens whose KV exists."""
        return self.computed

    @property
    def view(self) -> JobView:
        """Return the request as an intra-instance policy sees it."""
        reasons = self.reasons and self.reasoning_end is None
        return view_of(self.turn, reasons, len(self.prompt), len(self.outputs), self.reasoning_tokens)

    @property
    def decodes(self) -> bool:
        """Return whether all tokens but the latest are computed and the latest is an output."""
        return bool(self.outputs) and self.computed == self.total - 1

    @property
    def exporting(self) -> bool:
        """Return whether an export is open; such requests are preempted last."""
        return self.exported_outputs is not None

    @property
    def decode_phase(self) -> Phase:
        """Return the phase when the prompt is computed."""
        if self.reasons and self.reasoning_end is None:
            return Phase.REASONING
        return Phase.ANSWERING

    @property
    def reasoning_tokens(self) -> int:
        """Return the output tokens up to the end of the reasoning."""
        if not self.reasons:
            return 0
        return len(self.outputs) if self.reasoning_end is None else self.reasoning_end + 1


_HALF: Final = 1 << 63


def predicted_remaining(request: Request, error: float | None) -> float | None:
    """Return the remaining output tokens with a relative error of up to `error`; None without predictions.

    The error is derived from the script's digest, so that it is the same on every engine and at any time.
    """
    if error is None:
        return None
    generated = len(request.outputs)
    remaining = max(0, request.finish_at + 1 - generated)
    draw = int.from_bytes(request.script.identity[16:24], "little") / _HALF - 1.0
    # The request's length limit includes the model's context length.
    most = tokens_left(len(request.prompt), generated, request.length_limit)
    return limited(remaining * (1.0 + error * draw), most)


class SimulatedRequests:
    """All requests that are not GONE."""

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._by_key: dict[RequestKey, Request] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: Request) -> None:
        """Add a request whose ID and key are not in the table."""
        self._by_id[request.request_id] = request
        self._by_key[request.key] = request

    def remove(self, request: Request) -> None:
        """Remove a request, which must be in the table."""
        del self._by_id[request.request_id]
        del self._by_key[request.key]

    def by_key(self, key: RequestKey) -> Request | None:
        """Return the request with this key, or None."""
        return self._by_key.get(key)

    def by_id(self, request_id: str) -> Request | None:
        """Return the request with this ID, or None."""
        return self._by_id.get(request_id)

    def of_client(self, client: int) -> list[Request]:
        """Return all requests of a front end."""
        return [request for request in self._by_id.values() if request.key.client == client]

    def known(self, request_id: str) -> Request:
        """Return the request with this ID. Raise Gone if there is none."""
        request = self._by_id.get(request_id)
        if request is None:
            raise Gone(f"request {request_id} is not on this engine")
        return request
