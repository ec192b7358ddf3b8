"""The simulated engine: vLLM's protocol and an engine's timing, without a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec
import numpy as np
from msgspec import structs

from tailrace.cache.book import CacheBook
from tailrace.cache.names import ALGORITHM, Naming
from tailrace.cluster import Phase
from tailrace.handover import LIVE, by_replay
from tailrace.intra.guarded import guarded, log_mistake
from tailrace.intra.registry import make_intra
from tailrace.model_identity import ModelIdentity, identify_model
from tailrace.output_flags import OutputFlag
from tailrace.policy.parameters import NO_PARAMETERS, Value
from tailrace.profiles import Profile, ProfileError, load_profile
from tailrace.slo import Slo
from tailrace.wire.outputs import FinishReason
from tailrace.wire.ready import ReadyResponse, write_ready
from worker_agent.engine.base import (
    EngineInfo,
    EngineSink,
    EngineStats,
    Exported,
    ExportedPause,
    Frames,
    Held,
    KvShape,
    RequestKey,
    RequestStats,
    Staging,
    Submission,
)
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.host_ledger import HostLedger
from worker_agent.engine.simulated.clock import Boundary, Clock, Timer
from worker_agent.engine.simulated.emitter import Emitter
from worker_agent.engine.simulated.kv import BlockPool, Bytes, HostStaging, KvCodec
from worker_agent.engine.simulated.migration import SimulatedExports, SimulatedImports, check_state
from worker_agent.engine.simulated.prefixes import Prefixes
from worker_agent.engine.simulated.request import (
    Request,
    RequestReader,
    SimulatedRequests,
    State,
    answer_utility,
    predicted_remaining,
)
from worker_agent.engine.simulated.scheduler import HostMemory, Scheduler, Step
from worker_agent.engine.simulated.script import read_vocabulary
from worker_agent.engine.simulated.settings import SimulatedFaults, SimulatedSettings, at_speed
from worker_agent.engine.step_times import RecentIntervals, RecentStepTimes
from worker_agent.engine.turns import remaining_prefill_s

# Plain ints: arithmetic on enum flags costs a microsecond, and this happens for every token.
_PREFILL_DONE: Final = int(OutputFlag.PREFILL_DONE)
_REASONING_ENDED: Final = int(OutputFlag.REASONING_ENDED)
_ANSWER_BEGUN: Final = int(OutputFlag.ANSWER_BEGUN)
_FINISHED: Final = int(OutputFlag.FINISHED)
_FAILED: Final = int(OutputFlag.FAILED)
# How often a hanging engine checks whether the fault has been cleared.
_HANG_CHECK_S: Final = 0.05


class SimulatedEngine:
    """An implementation of worker_agent.engine.base.Engine that is driven by a single timer.

    A step is planned when it begins, and its tokens are emitted when it ends. A request that is aborted in
    between drops out of the step; one that is to be paused generates its token first, as in vLLM.
    """

    def __init__(
        self,
        settings: SimulatedSettings,
        *,
        faults: SimulatedFaults | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`clock` defaults to the running event loop. Raise RuntimeError for invalid settings."""
        self.faults = faults or SimulatedFaults(die_on_prompt=tuple(settings.dies_of.encode("ascii")) or None)
        self._settings = settings
        try:
            named = settings.profile
            profile = load_profile(named) if isinstance(named, str) else named
        except ProfileError as error:
            raise RuntimeError(str(error)) from error
        try:
            self._profile_at_speed = at_speed(profile, settings.speed)
        except (ValueError, ZeroDivisionError) as error:
            raise RuntimeError(f"speed {settings.speed:g}: {error}") from error
        self._profile = profile
        self._shape = _kv_shape(settings)
        self._vocabulary = read_vocabulary(settings.tokenizer, settings.think, settings.end_think)
        blocks = settings.kv_blocks or profile.kv_capacity_tokens // settings.block_tokens
        self._max_model_len = min(settings.max_model_len, blocks * settings.block_tokens)
        self._book = CacheBook() if settings.prefix_caching else None
        self._pool = BlockPool(blocks, settings.block_tokens, self._book)
        self._scheduler = Scheduler(
            self._pool,
            profile,
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            _host_memory(settings, profile),
            lambda: self._intervals.summary(self._live_clock().time(), time.time()),
            settings.prefix_caching,
        )
        self._table = SimulatedRequests()
        codec = KvCodec(self._shape)
        # The seed depends on the model, so blocks of different models have different names.
        self._naming = Naming(
            algorithm=ALGORITHM, seed=self._shape.model_fingerprint, block_tokens=settings.block_tokens
        )
        self._reader = RequestReader(settings, self._vocabulary, self._naming, self._max_model_len)
        self._prefixes = Prefixes(self._pool, self._reader, codec, settings.prefix_caching)
        self._exports = SimulatedExports(
            self._table, self._scheduler, codec, self._shape, settings.replay_reason, self.faults
        )
        self._imports = SimulatedImports(
            self._table, self._scheduler, self._reader, codec, self._shape, self.faults
        )
        self._intervals = RecentIntervals()
        self._boundary = Boundary()
        self._clock = clock
        self._timer: Timer | None = None
        self._step: Step | None = None
        self._times = RecentStepTimes()
        # When the current step began, when it is due to end, and when the previous one ended.
        self._began_s = 0.0
        self._due_s = 0.0
        self._ended_s = 0.0
        self._generated_tokens = 0
        self._sink: EngineSink | None = None
        self._emitter: Emitter | None = None

    # ---- lifecycle

    async def start(self, sink: EngineSink) -> EngineInfo:
        if self._clock is None:
            self._clock = asyncio.get_running_loop()
        self._sink = sink
        self._emitter = Emitter(sink)
        settings = self._settings
        return EngineInfo(
            engine="simulated",
            model=settings.model,
            identity=_identity(settings),
            handover=by_replay(settings.replay_reason) if settings.replay_reason else LIVE,
            kv_shape=self._shape,
            kv_blocks_total=self._pool.total,
            max_model_len=self._max_model_len,
            max_num_seqs=settings.max_num_seqs,
            ready_response=write_ready(
                ReadyResponse(
                    max_model_len=self._max_model_len,
                    num_gpu_blocks=self._pool.total,
                    block_size=settings.block_tokens,
                    dp_stats_address=None,
                    dtype="float32",
                    vllm_version="0.32.0",
                    world_size=1,
                    data_parallel_size=1,
                    tensor_parallel_size=1,
                    pipeline_parallel_size=1,
                    decode_context_parallel_size=1,
                    data_parallel_rank=0,
                    max_num_seqs=settings.max_num_seqs,
                    max_num_batched_tokens=settings.max_num_batched_tokens,
                    instance_id="simulated",
                    supports_lora=False,
                    max_loras=0,
                    kv_cache_size_tokens=self._pool.total * settings.block_tokens,
                    kv_cache_max_concurrency=self._pool.total * settings.block_tokens / self._max_model_len,
                    effective_attention_block_size=settings.block_tokens,
                )
            ),
            profile=self._profile_at_speed,
            hardware=f"simulated {self._profile.name} x{settings.speed:g}",
            step_tokens=settings.max_num_batched_tokens,
            cache=self._book,
            naming=None if self._book is None else self._naming,
        )

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sink = self._emitter = self._step = None
        self._imports.waiting.clear()
        for request in list(self._table):
            self._free(request)
        # Calls that wait for the end of the step fail, because their requests are gone.
        self._boundary.run_pending()

    def fail(self, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        sink, self._emitter = self._sink, None
        if sink is not None:
            sink.on_engine_dead(reason)

    # ---- the data path

    def submit(self, submission: Submission) -> None:
        """Engine.submit. The submission replaces a request of an older epoch and an import that is not active
        yet."""
        emitter = self._live_emitter()
        self._imports.waiting.remove(submission.request_id)
        for old in (self._table.by_key(submission.key), self._table.by_id(submission.request_id)):
            if old is None or old.state is State.GONE:
                continue
            if old.epoch >= submission.epoch and old.state is not State.IMPORTING:
                emitter.refuse(submission)
                return
            self._free(old)
        try:
            request = self._reader.read(
                submission.key,
                submission.epoch,
                submission.frames,
                submission.output_token_ids,
                submission.frontend_id,
                submission.traceparent,
            )
            if submission.sampling_state:
                check_state(request, len(request.outputs), submission.sampling_state)
        except EngineRefusal as refusal:
            emitter.refuse(submission, refusal)
            return
        outputs = request.outputs
        if outputs and self._ends(request, len(outputs) - 1, outputs[-1]):
            # The front end received the last token but not the end of the stream.
            reason, stop = self._finish_reason(request, outputs[-1])
            emitter.add(request, len(outputs), [], _FINISHED, reason, stop)
            emitter.flush()
            return
        if submission.answer_tokens:
            request.turn.start_answering(time.time(), submission.answering_s)
        request.turn.queue_s = sum(
            remaining_prefill_s(other.total, other.computed)
            for other in self._table
            if other.state is not State.IMPORTING
        )
        self._table.add(request)
        self._scheduler.enqueue(request)
        self._wake()

    def abort(self, keys: Sequence[RequestKey]) -> None:
        for key in keys:
            self._imports.waiting.remove_key(key)
            request = self._table.by_key(key)
            if request is not None:
                self._free(request)
        self._wake()

    def abort_client(self, client: int) -> None:
        self._imports.waiting.remove_client(client)
        for request in self._table.of_client(client):
            self._free(request)
        self._wake()

    def utility(self, client: int, call_id: int, frames: Frames) -> None:
        if self._sink is None:
            raise RuntimeError("the engine is not started")
        self._sink.on_utility(client, call_id, answer_utility(call_id, frames))

    def set_intra(
        self, name: str, parameters: Mapping[str, Value] = NO_PARAMETERS, slo: Slo | None = None
    ) -> None:
        self._scheduler.use_policy(guarded(name, make_intra(name, parameters, slo), log_mistake))
        self._wake()

    def stats(self) -> EngineStats:
        mean_ms, p99_ms = self._intervals.mean_and_p99_ms(self._live_clock().time())
        requests = [
            self._stats_of(request, mean_ms)
            for request in self._table
            if request.state is not State.IMPORTING
        ]
        backlog = sum(
            max(0, request.total - request.computed - 1)
            for request in self._table
            if request.state is not State.IMPORTING
        )
        host = self._scheduler.host
        return EngineStats(
            requests=requests,
            kv_blocks_used=self._pool.used,
            kv_blocks_total=self._pool.total,
            host_kv_bytes_used=host.used * host.block_bytes,
            host_kv_bytes_total=host.total * host.block_bytes,
            swaps_out=host.swapped_out,
            swaps_in=host.swapped_in,
            swaps_refused=host.refused,
            prefill_backlog_tokens=backlog,
            steps=self._emitter.steps if self._emitter is not None else 0,
            generated_tokens=self._generated_tokens,
            preemptions=self._scheduler.preemptions,
            kept_back_steps=self._scheduler.kept_back_steps,
            order_mistake="" if self._scheduler.intra is None else self._scheduler.intra.mistake,
            prompt_tokens=self._scheduler.prompt_tokens,
            cached_prompt_tokens=self._scheduler.cached_prompt_tokens,
            token_interval_ms_mean=mean_ms,
            token_interval_ms_p99=p99_ms,
            expected_step_s=self._times.expected_s(
                max(
                    self._step.tokens if self._step is not None else 0,
                    min(self._settings.max_num_batched_tokens, backlog + len(requests)),
                )
            ),
        )

    def request_stats(self, request_ids: Iterable[str]) -> list[RequestStats]:
        mean_ms, _ = self._intervals.mean_and_p99_ms(self._live_clock().time())
        return [
            self._stats_of(request, mean_ms)
            for request_id in request_ids
            if (request := self._table.by_id(request_id)) is not None and request.state is not State.IMPORTING
        ]

    def _stats_of(self, request: Request, mean_ms: float) -> RequestStats:
        intra = self._scheduler.intra
        swapped = self._scheduler.host.get(request.request_id)
        return RequestStats(
            request_id=request.request_id,
            frontend_id=request.frontend_id,
            epoch=request.epoch,
            phase=request.phase,
            state=request.state.value,
            prompt_tokens=len(request.prompt),
            output_tokens=len(request.outputs),
            reasoning_tokens=request.reasoning_tokens,
            max_tokens=request.length_limit,
            kv_blocks=len(request.blocks),
            kv_on_host=self._scheduler.on_host(request),
            arrival_s=request.arrival_s,
            token_interval_ms=mean_ms,
            demoted=intra is not None and intra.demoted(request.view),
            host_kv_blocks=0 if swapped is None else len(swapped.slots),
            predicted_remaining_tokens=predicted_remaining(request, self._settings.prediction_error),
        )

    async def find_held(self, keys: Sequence[RequestKey]) -> dict[RequestKey, Held]:
        requests = {key: self._table.by_key(key) for key in keys}
        return {
            key: Held(request.epoch, request.state is State.PAUSED)
            for key, request in requests.items()
            if request is not None and request.state is not State.IMPORTING
        }

    # ---- prefixes transferred between engines

    async def submitted(self, request_id: str) -> Frames:
        return self._table.known(request_id).frames

    async def loan_open(self, loan_id: str, names: Sequence[bytes]) -> int:
        return self._prefixes.open_loan(loan_id, names)

    async def loan_end(self, loan_id: str) -> None:
        self._prefixes.end_loan(loan_id)
        self._wake()

    async def fetch_missing(self, submission: Submission) -> list[bytes]:
        return self._prefixes.missing(submission)

    async def fetch_open(self, fetch_id: str, submission: Submission, max_tokens: int) -> list[bytes]:
        return self._prefixes.open_fetch(fetch_id, submission, max_tokens)

    async def fetch_keep(self, fetch_id: str, blocks: int) -> None:
        self._prefixes.keep(fetch_id, blocks)

    async def fetch_drop(self, fetch_id: str) -> None:
        self._prefixes.drop_fetch(fetch_id)
        self._wake()

    # ---- source of a migration

    async def export_open(self, request_id: str) -> Exported:
        return self._exports.open(request_id)

    async def export_more(self, request_id: str, have_blocks: int) -> list[bytes]:
        return self._exports.more(request_id, have_blocks)

    async def export_pause(self, request_id: str, have_blocks: int) -> ExportedPause:
        requested_s = self._live_clock().time()
        if self._step is not None:
            return await self._boundary.call(lambda: self._pause(request_id, have_blocks, requested_s))
        return self._pause(request_id, have_blocks, requested_s)

    def _pause(self, request_id: str, have_blocks: int, requested_s: float) -> ExportedPause:
        now_s = self._live_clock().time()
        interval_ms, _ = self._intervals.mean_and_p99_ms(now_s)
        return self._exports.pause(request_id, have_blocks, interval_ms, now_s - requested_s)

    async def export_stop(self, request_id: str) -> ExportedPause:
        requested_s = self._live_clock().time()
        if self._step is not None:
            return await self._boundary.call(lambda: self._stop_request(request_id, requested_s))
        return self._stop_request(request_id, requested_s)

    def _stop_request(self, request_id: str, requested_s: float) -> ExportedPause:
        now_s = self._live_clock().time()
        interval_ms, _ = self._intervals.mean_and_p99_ms(now_s)
        return self._exports.stop(request_id, interval_ms, now_s - requested_s)

    async def export_resume(self, request_id: str) -> None:
        self._exports.resume(request_id)
        self._wake()

    async def export_release(self, request_id: str) -> None:
        """Engine.export_release; a request that has ended meanwhile is ignored."""
        request = self._table.by_id(request_id)
        if request is None:
            return
        if request.state is not State.PAUSED:
            raise EngineRefusal(f"request {request_id} is {request.state.value}, not paused")
        self._free(request)
        self._wake()

    def staging(self, num_blocks: int) -> HostStaging:
        return HostStaging(np.empty(num_blocks * self._shape.block_bytes, np.uint8))

    def staging_over(self, memory: Bytes) -> HostStaging:
        return HostStaging(memory)

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        if self._prefixes.has_loan(request_id):
            return self._prefixes.read(request_id, first_block, num_blocks, out)
        return await self._exports.read(request_id, first_block, num_blocks, out)

    # ---- target of a migration

    async def replay_check(self, exported: Exported, key: RequestKey) -> None:
        self._imports.check_replay(exported, key)

    async def import_open(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        self._imports.open(exported, key, epoch)

    async def import_queue(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        await self._imports.queue(exported, key, epoch)

    def import_cached(self, request_id: str) -> int:
        return self._imports.cached(request_id)

    async def import_reserve(self, request_id: str, num_blocks: int) -> None:
        self._imports.reserve(request_id, num_blocks)

    async def write_blocks(
        self,
        request_id: str,
        first_block: int,
        num_blocks: int,
        received: Staging,
        checksums: Sequence[int],
    ) -> None:
        if self._prefixes.has_fetch(request_id):
            self._prefixes.write(request_id, first_block, num_blocks, received, checksums)
            return
        await self._imports.write(request_id, first_block, num_blocks, received, checksums)

    async def import_prepare(self, request_id: str, pause: ExportedPause) -> None:
        """Engine.import_prepare. Raise KvCorrupt if the blocks do not match the tokens."""
        self._imports.prepare(request_id, pause)

    async def import_activate(self, request_id: str) -> None:
        self._imports.activate(request_id)
        self._wake()

    async def import_drop(self, request_id: str) -> None:
        self._imports.waiting.remove(request_id)
        request = self._imports.find(request_id)
        if request is not None:
            self._free(request)
            self._wake()

    # ---- steps

    def _wake(self) -> None:
        """Start stepping if no step is in progress."""
        if self._timer is None and self._emitter is not None:
            self._due_s = self._live_clock().time()
            self._timer = self._live_clock().call_at(self._due_s, self._begin_step)

    def _begin_step(self) -> None:
        self._timer = None
        clock = self._live_clock()
        if self.faults.hang:
            self._timer = clock.call_at(clock.time() + _HANG_CHECK_S, self._begin_step)
            return
        self._boundary.run_pending()
        self._imports.waiting.admit()
        self._step = self._scheduler.plan()
        if self._step is None:
            self._ended_s = 0.0
            return
        self._began_s = clock.time()
        # Count from when the last step was due, not from now, so that late timers do not slow the engine
        # down.
        self._due_s = max(self._due_s + self._step.ms / 1000 / self._settings.speed, clock.time())
        self._timer = clock.call_at(self._due_s, self._end_step)

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is None or self.faults.hang:
            # The hang loses the step's outputs.
            self._begin_step()
            return
        if self.faults.die_on_prompt is not None and self._crashes(step):
            self.fail("a fault: it does not bear that prompt")
            return
        running = State.RUNNING
        for request in step.decodes:
            if request.state is running:
                request.computed += 1
                self._sample(request)
        for request, tokens in step.chunks:
            if request.state is running:
                request.computed += tokens
                if request.computed == request.total:
                    self._sample(request)
        now_s = self._live_clock().time()
        self._times.add(now_s - self._began_s, step.tokens)
        # A virtual clock may stand still during a step.
        if step.decodes and 0.0 < self._ended_s < now_s:
            self._intervals.add(now_s, (now_s - self._ended_s) * 1000, len(step.decodes))
        self._ended_s = now_s
        self._live_emitter().flush()
        # The sink may have stopped the engine.
        if self._emitter is not None:
            self._begin_step()

    def _crashes(self, step: Step) -> bool:
        """Return whether the step would generate the token at which the engine is set to die."""
        sampling = [*step.decodes]
        sampling += [request for request, tokens in step.chunks if request.computed + tokens == request.total]
        return any(
            request.state is State.RUNNING
            and len(request.outputs) == self.faults.die_at_index
            and tuple(request.prompt) == self.faults.die_on_prompt
            for request in sampling
        )

    def _sample(self, request: Request) -> None:
        emitter = self._live_emitter()
        outputs = request.outputs
        index = len(outputs)
        if index == self.faults.fail_at_index:
            emitter.add(request, index, [], _FAILED, FinishReason.ERROR)
            self._free(request)
            return
        token = request.script.token(index)
        outputs.append(token)
        request.total += 1
        self._generated_tokens += 1
        flags = 0
        if request.phase is Phase.PREFILL:
            flags = _PREFILL_DONE
            request.phase = request.decode_phase
            if request.phase is Phase.ANSWERING:
                flags |= _REASONING_ENDED
        if request.reasoning_end is not None and request.reasoning_end == index - 1:
            flags |= _ANSWER_BEGUN
        if request.reasoning_end is None and request.reasons and token == self._vocabulary.end_think:
            flags |= _REASONING_ENDED
            request.reasoning_end = index
            request.phase = Phase.ANSWERING
        if flags & _REASONING_ENDED:
            request.turn.start_answering(time.time())
        if self._ends(request, index, token):
            reason, stop = self._finish_reason(request, token)
            emitter.add(request, index, [token], flags | _FINISHED, reason, stop)
            self._free(request)
        else:
            emitter.add(request, index, [token], flags)

    @staticmethod
    def _ends(request: Request, index: int, token: int) -> bool:
        return index >= request.finish_at or token in request.stops

    @staticmethod
    def _finish_reason(request: Request, token: int) -> tuple[FinishReason, int | None]:
        """Return the reason that vLLM's check_stop would, checking in its order."""
        if token == request.script.eos:
            return FinishReason.STOP, None
        if token in request.stops:
            return FinishReason.STOP, token
        return FinishReason.LENGTH, None

    def _free(self, request: Request) -> None:
        self._imports.discard(request)
        self._table.remove(request)
        self._scheduler.drop(request)

    def _live_clock(self) -> Clock:
        if self._clock is None:
            raise RuntimeError("the engine is not started")
        return self._clock

    def _live_emitter(self) -> Emitter:
        if self._emitter is None:
            raise RuntimeError("the engine is not started")
        return self._emitter


def _host_memory(settings: SimulatedSettings, profile: Profile) -> HostMemory:
    block_bytes = settings.block_tokens * profile.kv_bytes_per_token
    ledger = HostLedger(settings.host_kv_bytes // block_bytes, block_bytes)
    return HostMemory(ledger, profile.swap)


def _identity(settings: SimulatedSettings) -> ModelIdentity:
    """Return the identity of the simulated model or, if none is named, of the tokenizer's model."""
    named = settings.model != SimulatedSettings().model
    identity = identify_model(settings.model if named else settings.tokenizer)
    if not settings.weights_seed:
        return identity
    return structs.replace(identity, weights=f"{identity.weights}-seed-{settings.weights_seed}")


def _kv_shape(settings: SimulatedSettings) -> KvShape:
    layer_block_bytes = settings.block_tokens * settings.kv_bytes_per_token // settings.num_layers
    if layer_block_bytes < 8 or layer_block_bytes % 8:
        raise RuntimeError(
            f"a layer's KV block is {layer_block_bytes} bytes; block_tokens * kv_bytes_per_token / num_layers"
            " must be a multiple of 8"
        )
    # Everything that the tokens and the KV bytes depend on.
    identity = (
        settings.model,
        settings.weights_seed,
        settings.tokenizer.rsplit("/", 1)[-1],
        settings.think,
        settings.end_think,
        settings.reasoning_mean_tokens,
        settings.answer_mean_tokens,
    )
    return KvShape(
        model_fingerprint=blake2b(msgspec.msgpack.encode(identity), digest_size=16).hexdigest(),
        block_tokens=settings.block_tokens,
        num_layers=settings.num_layers,
        layer_block_bytes=layer_block_bytes,
    )
