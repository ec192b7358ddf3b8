"""One request in a simulated engine."""

from __future__ import annotations

import enum
import itertools
import time
from typing import Final

from tailrace.intra.base import JobView
from tailrace.lengths import limited, tokens_left
from worker_agent.engine.base import EnginePhase, Frames, RequestKey
from worker_agent.engine.simulated.kv import BlockChain
from worker_agent.engine.simulated.script import Script
from worker_agent.engine.turns import Turn, arrival_order, view_of

_numbers = itertools.count()


class State(enum.Enum):
    """Where a request is in its life on this engine."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    # Stopped by its export; holds its blocks.
    PAUSED = "paused"
    # Its KV is being received; holds its blocks.
    IMPORTING = "importing"
    # Gone; whatever still names it must let go.
    GONE = "gone"


class Request:
    """Mutable state; the scheduler, the exports and the imports each change their part of it."""

    __slots__ = (
        "arrival_s",
        "blocks",
        "came_s",
        "chain",
        "closes_at",
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
        "reasons",
        "request_id",
        "script",
        "state",
        "stops",
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
        closes_at: int | None,
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
        # Index of the last token that the lengths or the end-of-sequence token allow.
        self.finish_at = min(length_at, script.eos_at)
        # The model reasons, and the prompt has not closed the thought.
        self.reasons = reasons
        # Index of the output that closed the thought.
        self.closes_at = closes_at
        self.logprobs = logprobs
        self.arrival_s = arrival_s
        self.trace_headers = trace_headers
        # Tokens in all, and those whose KV exists.
        self.total = len(prompt) + len(outputs)
        self.computed = 0
        self.blocks: list[int] = []
        self.state = State.WAITING
        self.turn = Turn(arrival_order(arrival_s, next(_numbers)))
        self.phase = EnginePhase.PREFILL
        # Output tokens that its open export has named; None: no export is open.
        self.exported_outputs: int | None = None
        # Monotonic seconds when it came; told to the API server's metrics.
        self.came_s = time.monotonic()

    # ---- as worker_agent.engine.step_order.Member

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.total

    @property
    def num_output_tokens(self) -> int:
        """Output."""
        return len(self.outputs)

    @property
    def num_output_placeholders(self) -> int:
        """A step's tokens are there before the next one begins."""
        return 0

    @property
    def num_computed_tokens(self) -> int:
        """Those whose KV exists."""
        return self.computed

    @property
    def view(self) -> JobView:
        """What an intra-instance policy sees."""
        reasons = self.reasons and self.closes_at is None
        return view_of(self.turn, reasons, len(self.prompt), len(self.outputs), self.reasoning_tokens)

    @property
    def decodes(self) -> bool:
        """All but its latest token is computed, and that one is an output."""
        return bool(self.outputs) and self.computed == self.total - 1

    @property
    def exporting(self) -> bool:
        """An export is open: its blocks are given up last."""
        return self.exported_outputs is not None

    @property
    def decode_phase(self) -> EnginePhase:
        """The phase once its prompt is computed."""
        if self.reasons and self.closes_at is None:
            return EnginePhase.REASONING
        return EnginePhase.ANSWERING

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens up to the end of the thought."""
        if not self.reasons:
            return 0
        return len(self.outputs) if self.closes_at is None else self.closes_at + 1


_HALF: Final = 1 << 63


def predicted_remaining(request: Request, error: float | None) -> float | None:
    """Output tokens still to come, off by up to the share `error` of them; None when nothing is predicted.

    The share is drawn from what decides the request's tokens: the same on every engine and at every moment.
    """
    if error is None:
        return None
    made = len(request.outputs)
    left = max(0, request.finish_at + 1 - made)
    draw = int.from_bytes(request.script.identity[16:24], "little") / _HALF - 1.0
    # The script's own limit holds the model's longest context too.
    return limited(left * (1.0 + error * draw), tokens_left(len(request.prompt), made, request.length_limit))
