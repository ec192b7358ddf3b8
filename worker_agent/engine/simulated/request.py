"""The requests of a simulated engine, and how they are read from vLLM's messages."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tailrace.cache.names import NO_KEYS, Naming
from tailrace.cluster import Phase
from tailrace.intra.base import JobView
from tailrace.perf.remaining import limited, tokens_left
from tailrace.wire.cache_keys import read_cache_keys
from tailrace.wire.requests import read_full_request, read_utility, utility_failure, utility_result
from worker_agent.engine.base import Frames, RequestKey
from worker_agent.engine.errors import Gone, Unrunnable
from worker_agent.engine.simulated.kv import BlockChain
from worker_agent.engine.simulated.script import Script, Vocabulary, opens_reasoning
from worker_agent.engine.simulated.settings import SimulatedSettings
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


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request's mutable state; the scheduler, the exports and the imports each change their part of it."""

    key: RequestKey
    request_id: str
    epoch: int
    frames: Frames
    frontend_id: str
    traceparent: str
    prompt: list[int]
    outputs: list[int]
    script: Script
    chain: BlockChain
    # Most output tokens.
    length_limit: int
    # The model reasons, and the prompt has not ended the reasoning.
    reasons: bool
    # Index of the output token that ended the reasoning.
    reasoning_end: int | None
    logprobs: int | None
    arrival_s: float
    trace_headers: dict[str, str] | None
    stops: frozenset[int] = field(init=False)
    # Index of the last token, given by the length limit or the end-of-sequence token.
    finish_at: int = field(init=False)
    # Number of all tokens, and of those whose KV exists.
    total: int = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    state: State = State.WAITING
    turn: Turn = field(init=False)
    phase: Phase = Phase.PREFILL
    # Output tokens that the open export has reported; None: no export is open.
    exported_outputs: int | None = None
    # Monotonic time of submission, for the API server's metrics.
    submitted_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.stops = self.script.stops
        self.finish_at = min(self.length_limit - 1, self.script.eos_at)
        self.total = len(self.prompt) + len(self.outputs)
        self.turn = Turn(arrival_order(self.arrival_s, next(_numbers)))

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


class RequestReader:
    """Decodes requests for one engine."""

    def __init__(
        self, settings: SimulatedSettings, vocabulary: Vocabulary, naming: Naming, max_model_len: int
    ) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._naming = naming
        self._max_model_len = max_model_len

    def read(
        self,
        key: RequestKey,
        epoch: int,
        frames: Frames,
        output_token_ids: Sequence[int],
        frontend_id: str,
        traceparent: str,
    ) -> Request:
        """Decode a request. Raise Unrunnable."""
        try:
            message = read_full_request(frames)
        except msgspec.DecodeError as error:
            raise Unrunnable(f"malformed request: {error}") from error
        sampling = message.sampling_params
        prompt = message.prompt_token_ids
        if sampling is None or not prompt:
            raise Unrunnable("the simulated engine continues prompts of token ids only")
        if sampling.prompt_logprobs is not None:
            raise Unrunnable("the simulated engine has no prompt log probabilities")
        room = self._max_model_len - len(prompt)
        if room <= 0:
            raise Unrunnable(f"a prompt of {len(prompt)} tokens, of at most {self._max_model_len - 1}")
        try:
            script = Script(prompt, sampling, self._settings, self._vocabulary)
        except ValueError as error:
            raise Unrunnable(str(error)) from error
        cache_keys = read_cache_keys(frames)
        outputs = list(output_token_ids)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        end_think = self._vocabulary.end_think
        return Request(
            key=key,
            request_id=message.request_id,
            epoch=epoch,
            frames=frames,
            frontend_id=frontend_id,
            traceparent=traceparent,
            prompt=prompt,
            outputs=outputs,
            script=script,
            chain=BlockChain(
                self._naming, NO_KEYS if cache_keys is None else cache_keys.keys, prompt, outputs
            ),
            length_limit=limit,
            reasons=(
                self._settings.reasoning_mean_tokens > 0
                and end_think is not None
                and opens_reasoning(prompt, self._vocabulary) is not False
            ),
            reasoning_end=outputs.index(end_think) if end_think in outputs else None,
            logprobs=sampling.logprobs,
            arrival_s=message.arrival_time,
            trace_headers=message.trace_headers,
        )


_ANSWERS: Final[Mapping[str, object]] = {
    "get_supported_tasks": ("generate",),
    "is_sleeping": False,
    "is_scheduler_paused": False,
    "reset_prefix_cache": True,
    "reset_mm_cache": None,
    "reset_encoder_cache": None,
    "list_loras": (),
    "profile": None,
}


def answer_utility(call_id: int, frames: Frames) -> list[bytes]:
    """Return vLLM's answer to this call, or its failure for unknown methods."""
    try:
        method = read_utility(frames).method
    except msgspec.DecodeError as error:
        return utility_failure(call_id, f"malformed utility call: {error}")
    if method not in _ANSWERS:
        return utility_failure(
            call_id, f"Call to {method} method failed: the simulated engine has no method {method!r}"
        )
    return utility_result(call_id, _ANSWERS[method])
