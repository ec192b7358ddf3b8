"""VllmEngine: the Engine interface on the event loop, in front of the engine thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tailrace.intra.registry import make_intra
from tailrace.policy.parameters import NO_PARAMETERS, Value
from tailrace.records import RankRecord
from tailrace.slo import Slo
from worker_agent.engine.base import (
    EngineInfo,
    EngineSink,
    EngineStats,
    Exported,
    ExportedPause,
    Frames,
    Held,
    RequestKey,
    Staging,
    StepColumns,
    Submission,
)
from worker_agent.engine.errors import EngineRefusal, KvCorrupt
from worker_agent.engine.vllm.cache_watch import naming_of
from worker_agent.engine.vllm.core import EngineParts, EngineThread
from worker_agent.engine.vllm.engine_ranks import EngineRanks
from worker_agent.engine.vllm.exports import Paused
from worker_agent.engine.vllm.fingerprint import identity, kv_shape, ready_response
from worker_agent.engine.vllm.hardware import hardware
from worker_agent.engine.vllm.kv_blocks import DeviceStaging
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.orders import use_policy
from worker_agent.engine.vllm.settings import VllmSettings
from worker_agent.engine.vllm.stats import engine_stats
from worker_agent.ranks.messages import Address

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_START_DEADLINE_S = 1800.0
_STOP_DEADLINE_S = 30.0
_RANKS_DEADLINE_S = 60.0
# A command waits for the step in progress, and a long prompt on a slow machine makes a long step.
_COMMAND_DEADLINE_S = 30.0
# Beyond what any caller waits for room.
_QUEUE_DEADLINE_S = 600.0


class VllmEngine:
    """A vLLM engine core in a thread of this process; one a process. See base.Engine."""

    def __init__(self, settings: VllmSettings) -> None:
        """Nothing is loaded until start."""
        self._settings = settings
        self._thread = EngineThread(settings, self._deliver, self._report_death)
        self._dead = ""
        # Of an engine with several.
        self._ranks: EngineRanks | None = None
        # Bounded by the exports and imports that the worker lets run at a time.
        self._waiting: set[Future[Any]] = set()

    async def start(self, sink: EngineSink) -> EngineInfo:
        """Load the model and begin to step. Raises RuntimeError with what to do when it cannot."""
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_START_DEADLINE_S):
                self._parts = await asyncio.wrap_future(self._thread.start())
        except TimeoutError:
            raise RuntimeError(f"vLLM did not start within {_START_DEADLINE_S:.0f} s") from None
        except Exception as error:
            raise RuntimeError(f"vLLM did not start: {error}") from error
        core = self._parts.core
        if core.ranked:
            self._ranks = await self._serve_ranks(core)
        return EngineInfo(
            engine="vllm",
            model=self._settings.model,
            kv_shape=kv_shape(core),
            kv_blocks_total=core.kv_blocks_total,
            max_model_len=core.max_model_len,
            max_num_seqs=core.config.scheduler_config.max_num_seqs,
            ready_response=ready_response(core),
            hardware=_hardware(core, self._settings.cpu_threads),
            step_tokens=core.config.scheduler_config.max_num_batched_tokens,
            identity=await asyncio.to_thread(identity, self._settings.model, core),
            handover=core.handover,
            pooling=core.pooling,
            takes_adapters=core.config.lora_config is not None,
            cache=None if self._parts.cache is None else self._parts.cache.book,
            naming=None if self._parts.cache is None else naming_of(core),
            ranks=[RankRecord(process=each.process, hardware=each.hardware) for each in core.ranks]
            if core.ranked
            else [],
            ranked=self._ranks,
        )

    async def stop(self) -> None:
        """Stop stepping and free everything. Raises TimeoutError when a step does not end within 30 s."""
        try:
            if self._ranks is not None:
                await self._ranks.links.stop()
            await self._stop_thread()
        finally:
            if self._ranks is not None:
                # A worker that ends leaves no rank behind, whatever it hangs in.
                await asyncio.to_thread(self._ranks.clear)

    async def _stop_thread(self) -> None:
        if not await asyncio.to_thread(self._thread.stop, _STOP_DEADLINE_S):
            raise TimeoutError("the engine thread did not end")

    # ---- the data path

    def submit(self, submission: Submission) -> None:
        """Take a request."""
        self._thread.post(lambda: self._parts.admission.submit(submission))

    def abort(self, keys: Sequence[RequestKey]) -> None:
        """Free these requests, wherever they are in their life."""
        self._thread.post(lambda: self._parts.admission.abort(keys))

    def abort_client(self, client: int) -> None:
        """Free every request of a front end."""
        self._thread.post(lambda: self._parts.admission.abort_client(client))

    def utility(self, client: int, call_id: int, frames: Frames) -> None:
        """vLLM's utility call."""

        def run() -> None:
            answer = self._parts.utility.call(call_id, frames)
            self._loop.call_soon_threadsafe(self._sink.on_utility, client, call_id, answer)

        self._thread.post(run)

    def set_intra(
        self, name: str, parameters: Mapping[str, Value] = NO_PARAMETERS, slo: Slo | None = None
    ) -> None:
        """Engine.set_intra."""
        policy = make_intra(name, parameters, slo)
        self._thread.post(lambda: use_policy(policy, self._parts.core, self._parts.table))

    def stats(self) -> EngineStats:
        """The engine as it is now."""
        return engine_stats(self._parts.core, self._parts.table, self._parts.writer, self._parts.cache)

    async def held(self, keys: Sequence[RequestKey]) -> dict[RequestKey, Held]:
        """Those of these requests that the engine has."""
        return await self._ask(lambda parts: parts.admission.held(keys))

    # ---- source of a migration

    async def export_open(self, request_id: str) -> Exported:
        """Pin the request's full blocks; it goes on decoding."""
        return await self._ask(lambda parts: parts.exports.open(request_id))

    async def export_more(self, request_id: str, have_blocks: int) -> list[bytes]:
        """Pin and name the full blocks from number have_blocks on."""
        return await self._ask(lambda parts: parts.exports.more(request_id, have_blocks))

    async def export_pause(self, request_id: str, have_blocks: int) -> ExportedPause:
        """Stop scheduling the request. Its outputs were handed to the loop before this answer."""
        asked_s = time.monotonic()
        return await self._paused(
            lambda done: self._parts.exports.pause(request_id, have_blocks, asked_s, done)
        )

    async def export_stop(self, request_id: str) -> ExportedPause:
        """Stop scheduling the request, to be computed anew elsewhere."""
        asked_s = time.monotonic()
        return await self._paused(lambda done: self._parts.exports.stop(request_id, asked_s, done))

    async def export_resume(self, request_id: str) -> None:
        """Unpin, and go on."""
        await self._ask(lambda parts: parts.exports.resume(request_id))

    async def export_release(self, request_id: str) -> None:
        """Free the request and its blocks."""
        await self._ask(lambda parts: parts.exports.release(request_id))

    def staging(self, num_blocks: int) -> Staging:
        """A contiguous buffer in the memory that holds the KV."""
        return self._parts.core.kv.staging(num_blocks)

    def staging_over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        """The same over host memory; None where the KV is on a GPU."""
        return self._parts.core.kv.staging_over(memory)

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        """Copy pinned blocks into `out`, off the engine thread; one 64-bit checksum a block."""
        staging = _own(out, num_blocks)
        pinned = self._parts.read(request_id)

        def copy() -> list[int]:
            with pinned.reading:
                return pinned.read(self._parts.core, first_block, num_blocks, staging)

        return await asyncio.to_thread(copy)

    # ---- target of a migration

    async def replay_check(self, exported: Exported, key: RequestKey) -> None:
        """Whether the request could be computed anew here, now."""
        await self._ask(lambda parts: parts.imports.check_replay(exported, key))

    async def import_open(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        """Reserve room for the request as it is now."""
        await self._ask(lambda parts: parts.imports.open(exported, key, epoch))

    async def import_queue(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        """Reserve room for the request, first come, first served."""
        answer: Future[None] = self._new_answer()

        def done(error: EngineRefusal | None) -> None:
            if answer.set_running_or_notify_cancel():
                _settle(answer, error)

        def run() -> None:
            try:
                self._parts.imports.queue(exported, key, epoch, done)
            except EngineRefusal as refusal:
                done(refusal)
            # As in _ask.
            except Exception as error:  # noqa: BLE001
                _log.exception("a command failed")
                done(EngineRefusal(f"it failed: {error}"))

        self._thread.post(run)
        await self._answer(answer, _QUEUE_DEADLINE_S)

    def import_held(self, request_id: str) -> int:
        """Leading blocks that the prefix cache had."""
        return self._parts.imports.get(request_id).held

    async def import_reserve(self, request_id: str, num_blocks: int) -> None:
        """Grow the reservation."""
        await self._ask(lambda parts: parts.imports.reserve(request_id, num_blocks))

    async def write_blocks(
        self, request_id: str, first_block: int, num_blocks: int, received: Staging, checksums: Sequence[int]
    ) -> None:
        """Check and copy received blocks into the reservation, off the engine thread."""
        staging = _own(received, num_blocks)
        if len(checksums) != num_blocks:
            raise KvCorrupt(f"{len(checksums)} checksums for {num_blocks} blocks")
        found = self._parts.written(request_id)

        def copy() -> None:
            with found.writing:
                found.write(self._parts.core, first_block, num_blocks, staging, checksums)

        await asyncio.to_thread(copy)

    async def import_prepare(self, request_id: str, pause: ExportedPause) -> None:
        """Rebuild tokens, sampling and grammar state, ready to run."""
        answer: Future[None] = self._new_answer()

        def done(error: EngineRefusal | KvCorrupt | None) -> None:
            if answer.set_running_or_notify_cancel():
                _settle(answer, error)

        def run() -> None:
            try:
                self._parts.imports.prepare(request_id, pause, done)
            except EngineRefusal as refusal:
                done(refusal)

        self._thread.post(run)
        await self._answer(answer)

    async def import_activate(self, request_id: str) -> None:
        """Decode from the next index on."""
        await self._ask(lambda parts: parts.imports.activate(request_id))

    async def import_drop(self, request_id: str) -> None:
        """Free the reservation; unknown requests are ignored."""
        await self._ask(lambda parts: parts.imports.drop(request_id))

    # ---- prefixes that go from one engine to another

    async def submitted(self, request_id: str) -> Frames:
        """A request that is here, as it was submitted."""
        return await self._ask(lambda parts: parts.table.known(request_id).frames)

    async def loan_open(self, loan_id: str, names: Sequence[bytes]) -> int:
        """Pin blocks of the prefix cache."""
        answer: Future[int] = self._new_answer()

        def done(blocks: int) -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(blocks)

        await self._ask(lambda parts: parts.loans.open(loan_id, names, done))
        return await self._answer(answer)

    async def loan_end(self, loan_id: str) -> None:
        """Free them."""
        await self._ask(lambda parts: parts.loans.end(loan_id))

    async def fetch_lacks(self, submission: Submission) -> list[bytes]:
        """What the prefix cache lacks of a prompt."""
        return await self._ask(lambda parts: parts.fetches.lacks(submission))

    async def fetch_open(self, fetch_id: str, submission: Submission, most_tokens: int) -> list[bytes]:
        """Set blocks aside for what the prefix cache lacks of a prompt."""
        return await self._ask(lambda parts: parts.fetches.open(fetch_id, submission, most_tokens))

    async def fetch_keep(self, fetch_id: str, blocks: int) -> None:
        """The prefix cache has what has come."""
        await self._ask(lambda parts: parts.fetches.keep(fetch_id, blocks))

    async def fetch_drop(self, fetch_id: str) -> None:
        """Set nothing aside any more."""
        await self._ask(lambda parts: parts.fetches.drop(fetch_id))

    # ---- inner

    async def _serve_ranks(self, core: LoadedCore) -> EngineRanks:
        """Every rank comes, to move its part of the KV. Raises RuntimeError."""
        ranks = EngineRanks(self._parts, self._die)
        await ranks.links.open()
        address = Address(ranks.links.path, ranks.links.secret)
        try:
            await self._ask(lambda parts: parts.core.serve_ranks(address))
        except EngineRefusal as refusal:
            raise RuntimeError(f"the engine's ranks cannot move KV: {refusal}") from refusal
        await ranks.links.wait_for_all(_RANKS_DEADLINE_S)
        return ranks

    async def _ask(self, command: Callable[[EngineParts], _T]) -> _T:
        """Run a command between two steps; its result, or its EngineRefusal or KvCorrupt."""
        answer: Future[_T] = self._new_answer()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                result = command(self._parts)
            except (EngineRefusal, KvCorrupt) as error:
                answer.set_exception(error)
            # What a peer sent must not end the engine, whatever vLLM's decoder makes of it.
            except Exception as error:  # noqa: BLE001
                _log.exception("a command failed")
                answer.set_exception(EngineRefusal(f"it failed: {error}"))
            else:
                answer.set_result(result)

        self._thread.post(run)
        return await self._answer(answer)

    async def _paused(self, pause: Callable[[Paused], None]) -> ExportedPause:
        answer: Future[ExportedPause] = self._new_answer()

        def done(result: ExportedPause | EngineRefusal) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            if isinstance(result, EngineRefusal):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def run() -> None:
            try:
                pause(done)
            except EngineRefusal as refusal:
                done(refusal)

        self._thread.post(run)
        return await self._answer(answer)

    def _new_answer(self) -> Future[_T]:
        """An answer that also the engine's death settles. Raises EngineRefusal when it is dead already."""
        if self._dead:
            raise EngineRefusal(f"the engine has failed: {self._dead}")
        return Future()

    async def _answer(self, answer: Future[_T], deadline_s: float = _COMMAND_DEADLINE_S) -> _T:
        self._waiting.add(answer)
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise EngineRefusal(f"the engine did not answer within {deadline_s:.0f} s") from None
        finally:
            self._waiting.discard(answer)

    def _deliver(self, columns: list[StepColumns]) -> None:
        for entry in columns:
            self._sink.on_step(entry)

    def _report_death(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._die, reason)

    def _die(self, reason: str) -> None:
        if self._dead:
            # A rank died, and then the step that waited for it.
            return
        self._dead = reason
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(EngineRefusal(f"the engine has failed: {reason}"))
        self._sink.on_engine_dead(reason)


def _hardware(core: LoadedCore, cpu_threads: int | None) -> str:
    if core.ranked:
        return f"{len(core.ranks)} x {core.ranks[0].hardware}"
    return hardware(core.kv.device, cpu_threads)


def _settle(answer: Future[None], error: EngineRefusal | KvCorrupt | None) -> None:
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(None)


def _own(staging: Staging, num_blocks: int) -> DeviceStaging:
    """The buffer as this engine's own, which it must be, and large enough."""
    if not isinstance(staging, DeviceStaging) or len(staging.bytes) < num_blocks:
        raise ValueError(f"not a staging buffer of this engine for {num_blocks} blocks")
    return staging
