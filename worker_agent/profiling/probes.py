"""Probes: the worker's own requests, and the timing of their tokens.

They have a reserved client slot that belongs to no front end, so that their output is not sent to any front
end and they are not counted as users' requests.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import Phase
from tailrace.output_flags import OutputFlag
from worker_agent.engine.base import (
    Engine,
    EngineSink,
    EngineStats,
    Frames,
    RequestKey,
    RequestStats,
    StepColumns,
    Submission,
)


def own_stats(stats: EngineStats, probes: Probes) -> EngineStats:
    """Return the engine's statistics without the probes.

    Effects of probes on prefix caching and preemptions remain.
    """
    if not probes.generated_tokens and not len(probes):
        return stats
    users = without_probes(stats.requests)
    probe_requests = [request for request in stats.requests if request.frontend_id == NAME]
    backlog = sum(request.prompt_tokens for request in probe_requests if request.phase is Phase.PREFILL)
    return replace(
        stats,
        requests=users,
        kv_blocks_used=max(0, stats.kv_blocks_used - sum(request.kv_blocks for request in probe_requests)),
        prefill_backlog_tokens=max(0, stats.prefill_backlog_tokens - backlog),
        generated_tokens=max(0, stats.generated_tokens - probes.generated_tokens),
        token_interval_ms_mean=0.0 if probe_requests and not users else stats.token_interval_ms_mean,
        token_interval_ms_p99=0.0 if probe_requests and not users else stats.token_interval_ms_p99,
    )


def without_probes(requests: Sequence[RequestStats]) -> list[RequestStats]:
    """Return the requests of front ends."""
    return [request for request in requests if request.frontend_id != NAME]


PROBES: Final = -1
"""The client slot of probes; those of front ends count from 0."""

NAME: Final = "tailrace-profile"
"""The front-end id of probes."""

_ENDED: Final = int(OutputFlag.FINISHED | OutputFlag.FAILED)
# Printable ASCII: no special tokens of a byte-level tokenizer, and within any model's vocabulary.
_TOKENS: Final = range(32, 127)

Floats = NDArray[np.float64]


class ProbeFailed(Exception):
    """A probe failed; the message says why."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The measurements of a finished probe; times in seconds."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    # Mean time between its tokens.
    tpot_s: float
    # CascadeInfer's F_0 .. F_4 of the batch, averaged over its life.
    features: Floats


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A pure decode step: every request generated a token, none its first one."""

    seconds: float
    requests: int
    # KV tokens of the batch at the start of the step.
    kv_tokens: int


@dataclass(slots=True)
class _LiveProbe:
    key: RequestKey
    prompt_tokens: int
    wanted: int
    submitted_s: float
    # The integral of the batch features at its submission.
    before: Floats
    first_s: float = 0.0
    made: int = 0


@dataclass(slots=True)
class Observations:
    """Finished probes and decode steps since `Probes.begin`."""

    results: list[ProbeResult] = field(default_factory=list)
    steps: list[DecodeStep] = field(default_factory=list)


class Probes:
    """An EngineSink that takes the outputs of probes, and passes everything else on to `inner`."""

    # Whether to fail if a user's request generates a token meanwhile.
    exclusive = True

    def __init__(self, inner: EngineSink, clock: Callable[[], float]) -> None:
        """`clock`: returns seconds."""
        self.generated_tokens = 0
        self._inner = inner
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        # For the prompts' tokens: prompts differ, so that the prefix cache does not affect the measurement.
        self._random = random.Random(0)
        self._handles = 0
        self._live: dict[int, _LiveProbe] = {}
        self._changed = asyncio.Event()
        self._observed = Observations()
        self._failed = ""
        # Sums over the live probes (n, I, I^2, L), their integral over time, and its end.
        self._sums = np.zeros(5)
        self._integral = np.zeros(5)
        self._until_s = 0.0
        self._stepped_s: float | None = None

    def __len__(self) -> int:
        return len(self._live)

    # ---- EngineSink

    def on_step(self, columns: StepColumns) -> None:
        if columns.client == PROBES:
            self._loop.call_soon_threadsafe(self._step, columns)
            return
        if self._live and self.exclusive:
            self._loop.call_soon_threadsafe(self._fail, "a user's request came; it goes first")
        self._inner.on_step(columns)

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        self._inner.on_utility(client, call_id, frames)

    def on_engine_dead(self, reason: str) -> None:
        self._fail(f"the engine failed: {reason}")
        self._inner.on_engine_dead(reason)

    # ---- for the measurement

    def begin(self) -> Observations:
        """Start new observations, and return them."""
        self._observed = Observations()
        self._stepped_s = None
        return self._observed

    def submit(self, engine: Engine, prompt_tokens: int, output_tokens: int) -> None:
        """Submit a probe of exactly these lengths."""
        now_s = self._clock()
        self._accumulate(now_s)
        self._handles += 1
        key, name = RequestKey(PROBES, self._handles), f"{NAME}-{self._handles}"
        prompt = self._random.choices(_TOKENS, k=prompt_tokens)
        self._live[self._handles] = _LiveProbe(
            key, prompt_tokens, output_tokens, now_s, self._integral.copy()
        )
        self._sums += (0.0, 1.0, prompt_tokens, prompt_tokens**2, prompt_tokens)
        frames = _frames(name, prompt, output_tokens)
        engine.submit(Submission(key, name, epoch=0, frames=frames, frontend_id=NAME))

    @property
    def observed(self) -> Observations:
        """Return the observations since `begin`."""
        return self._observed

    async def ended(self, count: int) -> None:
        """Wait until `count` probes have ended since `begin`. Raise ProbeFailed."""
        while len(self._observed.results) < count:
            if self._failed:
                raise ProbeFailed(self._failed)
            self._changed.clear()
            await self._changed.wait()

    def drop(self, engine: Engine) -> None:
        """Abort all probes."""
        engine.abort_client(PROBES)
        self._live.clear()
        self._sums[:] = 0.0
        self._failed = ""

    # ---- internal

    def _fail(self, reason: str) -> None:
        self._failed = reason
        self._changed.set()

    def _step(self, columns: StepColumns) -> None:
        now_s = self._clock()
        self.generated_tokens += len(columns.token_ids)
        self._note_step(columns, now_s)
        self._accumulate(now_s)
        for handle, count, flags in zip(columns.handles, columns.counts, columns.flags, strict=True):
            live = self._live.get(handle)
            if live is None:
                continue
            if count and not live.made:
                live.first_s = now_s
            live.made += count
            self._sums[4] += count
            if flags & _ENDED:
                self._end(handle, live, flags, now_s)
        self._changed.set()

    def _note_step(self, columns: StepColumns, now_s: float) -> None:
        decoding = [live for live in self._live.values() if live.made]
        whole = len(decoding) == len(self._live) and set(columns.handles) >= self._live.keys()
        if whole and decoding and self._stepped_s is not None:
            kv_tokens = sum(live.prompt_tokens + live.made for live in decoding)
            self._observed.steps.append(DecodeStep(now_s - self._stepped_s, len(decoding), kv_tokens))
        self._stepped_s = now_s

    def _end(self, handle: int, live: _LiveProbe, flags: int, now_s: float) -> None:
        del self._live[handle]
        prompt = live.prompt_tokens
        self._sums -= (0.0, 1.0, prompt, prompt**2, prompt + live.made)
        if flags & OutputFlag.FAILED or live.made != live.wanted:
            self._failed = f"a request of {prompt} tokens ended after {live.made} of {live.wanted} tokens"
            return
        life_s = now_s - live.submitted_s
        features = (self._integral - live.before) / life_s if life_s > 0.0 else self._sums.copy()
        features[0] = 1.0
        between_s = (now_s - live.first_s) / (live.made - 1) if live.made > 1 else 0.0
        ttft_s = live.first_s - live.submitted_s
        self._observed.results.append(ProbeResult(prompt, live.made, ttft_s, between_s, features))

    def _accumulate(self, now_s: float) -> None:
        self._integral += self._sums * (now_s - self._until_s)
        self._until_s = now_s


def _frames(request_id: str, prompt: list[int], output_tokens: int) -> list[bytes]:
    """Encode vLLM's EngineCoreRequest: greedy sampling of exactly `output_tokens` tokens."""
    sampling = {"temperature": 0.0, "max_tokens": output_tokens, "ignore_eos": True}
    request = [request_id, prompt, None, sampling, None, time.time(), None, None, None]
    return [msgspec.msgpack.encode(request)]
