"""VllmEngine: the Engine interface, which passes calls from the event loop to the engine thread."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from vllm.version import __version__ as vllm_version

from tailrace.intra.guarded import guarded, log_mistake
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
    RequestStats,
    Staging,
    StepColumns,
    Submission,
)
from worker_agent.engine.errors import EngineRefusal, KvCorrupt, raised_anew
from worker_agent.engine.vllm.cache_watch import naming_of
from worker_agent.engine.vllm.core import EngineParts, EngineThread, use_policy
from worker_agent.engine.vllm.facts import (
    Compilations,
    engine_stats,
    identity,
    kv_shape,
    ready_response,
    request_stats,
)
from worker_agent.engine.vllm.kv_blocks import DeviceStaging
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.rank_facts import hardware
from worker_agent.engine.vllm.ranks import EngineRanks, encode_options, folder_key
from worker_agent.network import use_network_of
from worker_agent.parallel.node_gathering import Nodes
from worker_agent.parallel.node_span import NodeSpan, worker_span
from worker_agent.parallel.rank_leftovers import (
    Record,
    meeting_file,
    names_of,
    remove,
    remove_left_behind,
    remove_meeting,
)
from worker_agent.parallel.rank_messages import Address
from worker_agent.settings import EngineOptions

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_START_DEADLINE_S = 1800.0
_STOP_DEADLINE_S = 30.0
_DEAD_STOP_DEADLINE_S = 2.0
_RANKS_DEADLINE_S = 60.0
# A command waits for the step in progress, and a long prompt on a slow machine makes a long step.
_COMMAND_DEADLINE_S = 30.0
# Longer than any caller waits for room.
_QUEUE_DEADLINE_S = 600.0


class VllmEngine:
    """A vLLM engine core on a thread of this process, one per process. See base.Engine."""

    def __init__(self, options: EngineOptions) -> None:
        """Store the options; `start` loads the model."""
        self._options = options
        self._thread = EngineThread(options, self._deliver, self._report_death)
        self._dead = ""
        self._compilations = Compilations()
        # None if there is one rank.
        self._ranks: EngineRanks | None = None
        # The rendezvous of the only rank, which would stay if this process were killed.
        self._meeting = ""
        self._record = Record()
        # None if the engine is on this machine alone.
        self._nodes: Nodes | None = None
        # Bounded by the worker's limits on concurrent exports and imports.
        self._waiting: set[Future[Any]] = set()

    async def start(self, sink: EngineSink) -> EngineInfo:
        """Load the model and start stepping. Raises RuntimeError, saying what to change, if that fails."""
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        span = worker_span(self._options.arguments)
        if span is not None:
            self._nodes = await self._gather_nodes(span)
        remove_left_behind()
        try:
            async with asyncio.timeout(_START_DEADLINE_S):
                self._parts = await self._load()
        except TimeoutError:
            remove(names_of([os.getpid()]))
            raise RuntimeError(f"vLLM did not start within {_START_DEADLINE_S:.0f} s") from None
        except Exception as error:
            remove(names_of([os.getpid()]))
            raise RuntimeError(f"vLLM did not start: {error}") from error
        core = self._parts.core
        if core.ranked:
            self._ranks = await self._serve_ranks()
        else:
            self._meeting = core.ranks[0].meeting
            self._record.write(meeting_file(self._meeting))
        if span is not None and self._nodes is not None:
            self._nodes.loaded({span.of_rank(each.rank): each.meeting for each in core.ranks})
            self._nodes.lost.add_done_callback(self._node_lost)
        return EngineInfo(
            engine="vllm",
            model=self._options.model,
            kv_shape=kv_shape(core),
            kv_blocks_total=core.kv_blocks_total,
            max_model_len=core.max_model_len,
            max_num_seqs=core.config.scheduler_config.max_num_seqs,
            ready_response=ready_response(core),
            hardware=_hardware(core),
            step_tokens=core.config.scheduler_config.max_num_batched_tokens,
            identity=await asyncio.to_thread(identity, self._options.model, core),
            handover=core.handover,
            pooling=core.pooling,
            takes_adapters=core.config.lora_config is not None,
            cache=None if self._parts.cache is None else self._parts.cache.book,
            naming=None if self._parts.cache is None else naming_of(core),
            ranks=_rank_records(core, span),
            ranked=self._ranks,
        )

    async def stop(self) -> None:
        """Stop stepping and free everything. Raises TimeoutError when a step does not end within 30 s."""
        try:
            if self._ranks is not None:
                await self._ranks.links.stop()
            await self._stop_thread()
        finally:
            if self._nodes is not None:
                await (self._nodes.close() if self._dead else self._nodes.stop())
            if self._ranks is not None:
                # A worker that exits leaves no rank behind, even one that hangs.
                await asyncio.to_thread(self._ranks.clear)
            remove_meeting(self._meeting)
            self._record.clear()

    def fail(self, reason: str) -> None:
        if self._dead:
            # Reported twice: first a rank died, then the step that waited for it.
            return
        self._dead = reason
        for answer in self._waiting:
            # The engine thread may answer meanwhile.
            with suppress(InvalidStateError):
                answer.set_exception(EngineRefusal(f"the engine has failed: {reason}"))
        self._sink.on_engine_dead(reason)

    async def _stop_thread(self) -> None:
        if self._dead:
            # It may hang, or wait for a rank that is gone; vLLM does so for minutes if that was on another
            # machine.
            if not await asyncio.to_thread(self._thread.stop, _DEAD_STOP_DEADLINE_S):
                _log.warning("the engine thread still runs")
        elif not await asyncio.to_thread(self._thread.stop, _STOP_DEADLINE_S):
            raise TimeoutError("the engine thread did not end")

    # ---- the data path

    def submit(self, submission: Submission) -> None:
        self._thread.post(lambda: self._parts.submissions.submit(submission))

    def abort(self, keys: Sequence[RequestKey]) -> None:
        self._thread.post(lambda: self._parts.submissions.abort(keys))

    def abort_client(self, client: int) -> None:
        self._thread.post(lambda: self._parts.submissions.abort_client(client))

    def utility(self, client: int, call_id: int, frames: Frames) -> None:

        def run() -> None:
            answer = self._parts.utility.call(call_id, frames)
            self._loop.call_soon_threadsafe(self._sink.on_utility, client, call_id, answer)

        self._thread.post(run)

    def set_intra(
        self, name: str, parameters: Mapping[str, Value] = NO_PARAMETERS, slo: Slo | None = None
    ) -> None:
        policy = guarded(name, make_intra(name, parameters, slo), log_mistake)
        self._thread.post(lambda: use_policy(policy, self._parts))

    def stats(self) -> EngineStats:
        parts = self._parts
        return engine_stats(parts.core, parts.table, parts.writer, parts.cache, self._compilations)

    def request_stats(self, request_ids: Iterable[str]) -> list[RequestStats]:
        found = map(self._parts.table.get, request_ids)
        return [request_stats(self._parts.core, entry) for entry in found if entry is not None]

    async def find_held(self, keys: Sequence[RequestKey]) -> dict[RequestKey, Held]:
        return await self._run(lambda parts: parts.submissions.find_held(keys))

    # ---- source of a migration

    async def export_open(self, request_id: str) -> Exported:
        return await self._run(lambda parts: parts.exports.open(request_id))

    async def export_more(self, request_id: str, have_blocks: int) -> list[bytes]:
        return await self._run(lambda parts: parts.exports.more(request_id, have_blocks))

    async def export_pause(self, request_id: str, have_blocks: int) -> ExportedPause:
        """Engine.export_pause. The sink has all outputs before this returns, as the engine thread delivers
        them first."""
        asked_s = time.monotonic()
        return await self._ask(
            lambda parts, done: parts.exports.pause(request_id, have_blocks, asked_s, done)
        )

    async def export_stop(self, request_id: str) -> ExportedPause:
        asked_s = time.monotonic()
        return await self._ask(lambda parts, done: parts.exports.stop(request_id, asked_s, done))

    async def export_resume(self, request_id: str) -> None:
        await self._run(lambda parts: parts.exports.resume(request_id))

    async def export_release(self, request_id: str) -> None:
        await self._run(lambda parts: parts.exports.release(request_id))

    def staging(self, num_blocks: int) -> Staging:
        return self._parts.core.kv.staging(num_blocks)

    def staging_over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        """Engine.staging_over; None if the KV is on a GPU."""
        return self._parts.core.kv.staging_over(memory)

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        """Engine.read_blocks, off the engine thread."""
        staging = _own_staging(out, num_blocks)
        pinned = self._parts.read(request_id)

        def copy() -> list[int]:
            with pinned.reading:
                return pinned.read(self._parts.core, first_block, num_blocks, staging)

        return await asyncio.to_thread(copy)

    # ---- target of a migration

    async def replay_check(self, exported: Exported, key: RequestKey) -> None:
        await self._run(lambda parts: parts.imports.check_replay(exported, key))

    async def import_open(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        await self._run(lambda parts: parts.imports.open(exported, key, epoch))

    async def import_queue(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        return await self._ask(
            lambda parts, done: parts.imports.queue(exported, key, epoch, done), _QUEUE_DEADLINE_S
        )

    def import_cached(self, request_id: str) -> int:
        return self._parts.imports.get(request_id).cached

    async def import_reserve(self, request_id: str, num_blocks: int) -> None:
        await self._run(lambda parts: parts.imports.reserve(request_id, num_blocks))

    async def write_blocks(
        self, request_id: str, first_block: int, num_blocks: int, received: Staging, checksums: Sequence[int]
    ) -> None:
        """Engine.write_blocks, off the engine thread."""
        staging = _own_staging(received, num_blocks)
        if len(checksums) != num_blocks:
            raise KvCorrupt(f"{len(checksums)} checksums for {num_blocks} blocks")
        found = self._parts.written(request_id)

        def copy() -> None:
            with found.writing:
                found.write(self._parts.core, first_block, num_blocks, staging, checksums)

        await asyncio.to_thread(copy)

    async def import_prepare(self, request_id: str, pause: ExportedPause) -> None:
        return await self._ask(lambda parts, done: parts.imports.prepare(request_id, pause, done))

    async def import_activate(self, request_id: str) -> None:
        await self._run(lambda parts: parts.imports.activate(request_id))

    async def import_drop(self, request_id: str) -> None:
        await self._run(lambda parts: parts.imports.drop(request_id))

    # ---- prefixes transferred between engines

    async def submitted(self, request_id: str) -> Frames:
        return await self._run(lambda parts: parts.table.known(request_id).frames)

    async def loan_open(self, loan_id: str, names: Sequence[bytes]) -> int:
        return await self._ask(lambda parts, done: parts.loans.open(loan_id, names, done))

    async def loan_end(self, loan_id: str) -> None:
        await self._run(lambda parts: parts.loans.end(loan_id))

    async def fetch_missing(self, submission: Submission) -> list[bytes]:
        return await self._run(lambda parts: parts.fetches.missing(submission))

    async def fetch_open(self, fetch_id: str, submission: Submission, max_tokens: int) -> list[bytes]:
        return await self._run(lambda parts: parts.fetches.open(fetch_id, submission, max_tokens))

    async def fetch_keep(self, fetch_id: str, blocks: int) -> None:
        await self._run(lambda parts: parts.fetches.keep(fetch_id, blocks))

    async def fetch_drop(self, fetch_id: str) -> None:
        await self._run(lambda parts: parts.fetches.drop(fetch_id))

    # ---- internals

    async def _gather_nodes(self, span: NodeSpan) -> Nodes:
        """Have every other node join, and start its ranks. Raises RuntimeError."""
        options = self._options
        model = await asyncio.to_thread(folder_key, options.model)
        nodes = Nodes(span, vllm_version)
        await nodes.gather(options.nodes_timeout_s)
        use_network_of(nodes.address)
        nodes.start(encode_options(options), model)
        return nodes

    async def _load(self) -> EngineParts:
        """Load the model on the engine thread. Raises RuntimeError if another node leaves meanwhile."""
        loading = asyncio.ensure_future(asyncio.wrap_future(self._thread.start()))
        if self._nodes is None:
            return await loading
        lost = self._nodes.lost
        either: set[asyncio.Future[Any]] = {loading, lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            loading.cancel()
            raise RuntimeError(f"{lost.result()}, and its log says why")
        return loading.result()

    def _node_lost(self, lost: asyncio.Future[str]) -> None:
        """End the engine: its ranks here may wait for those that are gone."""
        if not lost.cancelled():
            self.fail(lost.result())
            if self._ranks is not None:
                self._ranks.kill()

    async def _serve_ranks(self) -> EngineRanks:
        """Have every rank connect, to transfer its part of the KV. Raises RuntimeError."""
        ranks = EngineRanks(self._parts, self.fail)
        try:
            await ranks.links.open()
        except OSError as error:
            raise RuntimeError(f"the engine's ranks cannot connect: {error}") from error
        address = Address(ranks.links.path, ranks.links.secret)
        try:
            await self._run(lambda parts: parts.core.serve_ranks(address))
        except EngineRefusal as refusal:
            raise RuntimeError(f"the engine's ranks cannot move KV: {refusal}") from refusal
        await ranks.links.wait_for_all(_RANKS_DEADLINE_S)
        return ranks

    async def _run(self, command: Callable[[EngineParts], _T]) -> _T:
        """Run a command on the engine thread between two steps, and return its result. Raises EngineRefusal
        or KvCorrupt."""
        return await self._ask(lambda parts, done: done(command(parts)))

    async def _ask(
        self,
        command: Callable[[EngineParts, Callable[[_T | EngineRefusal | KvCorrupt], None]], None],
        deadline_s: float = _COMMAND_DEADLINE_S,
    ) -> _T:
        """Run a command on the engine thread between two steps, and return what it, or a later step, passes
        to its second argument. Raises EngineRefusal or KvCorrupt if it raises or passes one.

        A command that has not begun after `deadline_s`, or when the caller is cancelled, never begins."""
        if self._dead:
            raise EngineRefusal(f"the engine has failed: {self._dead}")
        answer: Future[_T] = Future()

        def done(result: _T | EngineRefusal | KvCorrupt) -> None:
            # The caller may have given up, or have been told that the engine is dead.
            with suppress(InvalidStateError):
                if isinstance(result, EngineRefusal | KvCorrupt):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)

        def run() -> None:
            try:
                if answer.done() or not answer.set_running_or_notify_cancel():
                    return
            except RuntimeError:
                # So a future says that it got its answer meanwhile: the engine was given up.
                return
            try:
                command(self._parts, done)
            except (EngineRefusal, KvCorrupt) as error:
                done(error)
            # Nothing that a peer sends may end the engine, whatever vLLM's decoder raises.
            except Exception as error:  # noqa: BLE001
                _log.exception("a command failed")
                done(EngineRefusal(f"it failed: {error}"))

        self._thread.post(run)
        self._waiting.add(answer)
        future = asyncio.wrap_future(answer)
        try:
            await asyncio.wait({future}, timeout=deadline_s)
            waited_s = deadline_s
            if not future.done() and not answer.cancel():
                # It has begun: the caller must hear what it has done, or it would be refused and yet done.
                await asyncio.wait({future}, timeout=_COMMAND_DEADLINE_S)
                waited_s += _COMMAND_DEADLINE_S
            if not future.done():
                raise EngineRefusal(f"the engine did not answer within {waited_s:.0f} s")
            return future.result()
        except (EngineRefusal, KvCorrupt) as error:
            raise raised_anew(error) from None
        finally:
            future.cancel()
            self._waiting.discard(answer)

    def _deliver(self, columns: list[StepColumns]) -> None:
        for entry in columns:
            self._sink.on_step(entry)

    def _report_death(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self.fail, reason)


def _rank_records(core: LoadedCore, span: NodeSpan | None) -> list[RankRecord]:
    """Describe the ranks, each with its process ID on its machine. Empty for an engine with one rank."""
    if not core.ranked:
        return []
    return [
        RankRecord(
            process=each.process,
            hardware=each.hardware if span is None else f"node {span.of_rank(each.rank)}: {each.hardware}",
        )
        for each in core.ranks
    ]


def _hardware(core: LoadedCore) -> str:
    if core.ranked:
        # Steps take longer if the ranks exchange their results over a network.
        where = f" on {core.nodes} nodes" if core.nodes > 1 else ""
        return f"{len(core.ranks)} x {core.ranks[0].hardware}{where}"
    return hardware(core.kv.device)


def _own_staging(staging: Staging, num_blocks: int) -> DeviceStaging:
    """Return the buffer as this engine's type. Raises ValueError if it is another engine's or too small."""
    if not isinstance(staging, DeviceStaging) or len(staging.bytes) < num_blocks:
        raise ValueError(f"not a staging buffer of this engine for {num_blocks} blocks")
    return staging
