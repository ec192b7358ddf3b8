"""From the engine to the front ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from tailrace.v1 import worker_pb2
from worker_agent.carried import Carried, CarriedRequests
from worker_agent.engine.base import Frames, OutputFlag, RequestKey, StepColumns
from worker_agent.frontends import FrontEnds
from worker_agent.metrics import WorkerMetrics
from worker_agent.phase_news import PhaseNews

# Plain ints: this is looked at for every entry that has a flag.
_ENDED: Final = int(OutputFlag.FINISHED | OutputFlag.FAILED)
# Both: the first token here is an answer's.
_NO_REASONING: Final = int(OutputFlag.PREFILL_DONE | OutputFlag.REASONING_ENDED)
_ANSWER_BEGUN: Final = int(OutputFlag.ANSWER_BEGUN)


class FrontEndSink:
    """EngineSink: one message per step and front end, columns as they are; looks only at flags."""

    def __init__(
        self,
        front_ends: FrontEnds,
        carried: CarriedRequests,
        news: PhaseNews,
        metrics: WorkerMetrics,
        on_dead: Callable[[str], None],
    ) -> None:
        self._front_ends = front_ends
        self._carried = carried
        self._news = news
        self._metrics = metrics
        self._on_dead = on_dead
        self._loop = asyncio.get_running_loop()

    def on_step(self, columns: StepColumns) -> None:
        """EngineSink.on_step: to the front end from whichever thread; what it changed, on the loop."""
        self._metrics.tokens += len(columns.token_ids)
        front_end = self._front_ends.by_client(columns.client)
        if front_end is None:
            return
        outputs = worker_pb2.StepOutputs(
            step=columns.step,
            frames=columns.frames,
            handles=columns.handles,
            epochs=columns.epochs,
            first_indices=columns.first_indices,
            counts=columns.counts,
            token_ids=columns.token_ids,
            flags=columns.flags,
        )
        front_end.send(worker_pb2.AttachDown(outputs=outputs))
        if any(columns.flags):
            self._loop.call_soon_threadsafe(self._tell, columns)

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        """EngineSink.on_utility."""
        front_end = self._front_ends.by_client(client)
        if front_end is not None:
            result = worker_pb2.UtilityResult(call_id=call_id, frames=frames)
            front_end.send(worker_pb2.AttachDown(utility=result))

    def on_engine_dead(self, reason: str) -> None:
        """EngineSink.on_engine_dead."""
        self._on_dead(reason)

    def _tell(self, columns: StepColumns) -> None:
        """Phase changes of this step."""
        for entry, flags in enumerate(columns.flags):
            if not flags:
                continue
            key = RequestKey(columns.client, columns.handles[entry])
            carried = self._carried.get(key)
            if carried is None or carried.epoch != columns.epochs[entry]:
                continue
            if flags & _ANSWER_BEGUN or flags & _NO_REASONING == _NO_REASONING:
                carried.pace.begin(columns.first_indices[entry], time.monotonic())
            if flags & _ENDED:
                self._ended(key, carried, flags, columns.first_indices[entry] + columns.counts[entry])
            else:
                self._news.changed(carried.request_id)

    def _ended(self, key: RequestKey, carried: Carried, flags: int, output_tokens: int) -> None:
        self._carried.remove(key)
        self._news.gone(carried, output_tokens)
        if flags & OutputFlag.FAILED:
            self._metrics.finished["failed"] += 1
            return
        self._metrics.finished["finished"] += 1
        if carried.pace.begun:
            carried.pace.count(output_tokens, time.monotonic())
            self._metrics.qoe.observe(carried.pace.qoe)
