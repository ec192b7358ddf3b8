"""How a request is copied to the target: live or by replay, in which rounds, and at which share of the link.

Rounds go on while the source decodes; the rest follows during the pause. Everything here can be cancelled at
any moment; the owner of the import then drops the reservation. In a replay nothing is copied: the source
stops the request and sends the tokens it has generated; once the front end has accepted, they are recomputed
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tailrace.handover import LIVE, Handover, TransferMode, by_replay
from tailrace.model_identity import ModelIdentity, difference
from tailrace.service.tasks import run_to_completion
from tailrace.v1 import types_pb2, worker_pb2
from worker_agent.engine.base import Engine, EngineInfo, ExportedPause, RequestKey, Submission
from worker_agent.engine.errors import EngineRefusal, KvCorrupt
from worker_agent.faults import Faults
from worker_agent.kv.address import BlockTransfer, KvIdentityError, KvTransferError, layout_difference
from worker_agent.metrics import WorkerMetrics
from worker_agent.migration.export_call import (
    SourceFailed,
    SourceLink,
    SourceLost,
    block_hashes,
    pause_of,
)

ABORTED: Final = types_pb2.MIGRATION_STATE_ABORTED
GONE: Final = types_pb2.MIGRATION_STATE_GONE


class Abort(Exception):
    """The import ends without a commit; the message says why.

    `state`: the migration's end; GONE if the request has left its source.
    """

    def __init__(self, reason: str, state: types_pb2.MigrationState.ValueType = ABORTED) -> None:
        super().__init__(reason)
        self.state = state


# What ends a copy, besides Abort.
COPY_FAILURES: Final = (TimeoutError, SourceFailed, SourceLost, EngineRefusal, KvCorrupt, KvTransferError)


def abort_of(error: Exception, late: str, metrics: WorkerMetrics) -> Abort:
    """Return the abort that follows from one of COPY_FAILURES; `late`: the reason of one for lack of time."""
    match error:
        case TimeoutError():
            return Abort(late)
        case SourceFailed():
            return Abort(f"source: {error}", GONE if error.gone else ABORTED)
        case SourceLost():
            return Abort(f"source: {error}")
        case EngineRefusal():
            return Abort(f"target: {error}")
        case KvCorrupt():
            metrics.kv_checksum_failures += 1
            return Abort(f"KV corrupted in transfer: {error}")
        case KvIdentityError():
            metrics.kv_identity_failures += 1
        case _:
            metrics.kv_transfer_failures += 1
    return Abort(f"KV transfer: {error}")


def handover_to(info: EngineInfo, opened: worker_pb2.ExportOpened) -> Handover:
    """Return how the request moves to an engine of this kind. Pure.

    Raise Abort if it can move neither live nor by replay; the message names the setting. A replay needs the
    same model computed in the same number formats; otherwise the answer would continue differently.
    """
    if info.handover.mode is TransferMode.STAYS:
        raise Abort(f"target: {info.handover.reason}")
    layouts = layout_difference(info.kv_shape, opened.layout)
    if opened.replay_reason:
        handover = by_replay(f"source: {opened.replay_reason}")
    elif info.handover.mode is TransferMode.REPLAY:
        handover = by_replay(f"target: {info.handover.reason}")
    elif layouts:
        handover = by_replay(layouts)
    else:
        return LIVE
    if opened.layout.model_fingerprint != info.kv_shape.model_fingerprint:
        model = opened.model
        models = difference(ModelIdentity(model.text, model.weights, model.precision), info.identity)
        if models:
            raise Abort(models)
    return handover


def identity_message(identity: ModelIdentity) -> worker_pb2.ModelIdentity:
    """Return the identity as a message."""
    return worker_pb2.ModelIdentity(
        text=identity.text, weights=identity.weights, precision=identity.precision
    )


_STOP_BLOCKS: Final = 2
_ROUNDS: Final = 8
_ROUNDS_MAX: Final = 32
_TIMEOUT_MAX_S: Final = 600.0
# Less than a source waits for a silent target (source.py).
_ROOM_WAIT_MAX_S: Final = 25.0


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """The rounds, the blocks to leave for the pause, and time limits.

    `stop_blocks`: a rest of at most this many blocks is copied during the pause. `room_wait_s`: seconds to
    wait for room (0: do not wait). `timeout_s`: seconds from then until the commit.
    """

    rounds: int
    stop_blocks: int
    room_wait_s: float
    timeout_s: float


def plan_of(request: worker_pb2.ImportRequest, timeout_s: float) -> ImportPlan:
    """Return the plan; zeroes in the request mean the defaults."""
    rounds = min(request.max_rounds or _ROUNDS, _ROUNDS_MAX)
    if request.mode == worker_pb2.COPY_MODE_STOP_AND_COPY:
        rounds = 0
    return ImportPlan(
        rounds=rounds,
        stop_blocks=request.stop_threshold_blocks or _STOP_BLOCKS,
        room_wait_s=min(max(0.0, request.room_wait_s), _ROOM_WAIT_MAX_S),
        timeout_s=min(request.timeout_s or timeout_s, _TIMEOUT_MAX_S),
    )


# Half. Rescheduling pays off over thousands of steps, so half the speed costs it little; and what a copy has
# to chase grows by a token per step, thousands of times slower than half of any link.
SHARE: Final = 0.5
# Largest accumulated budget in seconds of link time: a small request moves at full speed.
_BURST_S: Final = 0.1


def _loop_time_s() -> float:
    return asyncio.get_running_loop().time()


class LinkBudget:
    """Limit the share of a worker's link that background transfers use. Called on one event loop.

    A token bucket of link time: an active transfer spends it second by second, and it refills at `share`
    seconds per second. A share needs no figure for the link's speed, which differs between fleets and between
    pairs of hosts; and however fast the link is, the rest of its time stays free for the handovers that users
    wait for. One worker's incoming transfers share one budget, since their target drives them.
    """

    def __init__(self, share: float = SHARE, now_s: Callable[[], float] = _loop_time_s) -> None:
        """`share` in (0, 1]; 1: no limit. `now_s()`: seconds of one clock. Raise ValueError."""
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a share of a link is above 0 and at most 1, not {share}")
        self._share = share
        self._now_s = now_s
        self._budget_s = _BURST_S
        self._updated_s: float | None = None
        self._active = 0

    def wait_s(self) -> float:
        """Return the seconds until another transfer may begin; 0.0: now."""
        if self._share >= 1.0:
            return 0.0
        self._update()
        if self._budget_s > 0.0:
            return 0.0
        # It does not refill while others spend it; they end within a slice.
        return max(0.001, -self._budget_s / self._share)

    async def wait_for_budget(self) -> None:
        """Wait until a transfer may begin. The caller sets the deadline."""
        # Waits for time to pass, so there is no event.
        while (wait_s := self.wait_s()) > 0.0:  # noqa: ASYNC110
            await asyncio.sleep(wait_s)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Account for a transfer that is active during the block."""
        self._update()
        self._active += 1
        try:
            yield
        finally:
            self._update()
            self._active -= 1

    def _update(self) -> None:
        """Update the budget to the present."""
        now_s = self._now_s()
        passed_s = 0.0 if self._updated_s is None else now_s - self._updated_s
        self._updated_s = now_s
        rate = self._share - (1.0 if self._active else 0.0)
        self._budget_s = min(_BURST_S, self._budget_s + rate * passed_s)


_MS: Final = 1000.0
# Blocks per pull on a shared link: tens of milliseconds of a fast link.
_SLICE_BLOCKS: Final = 256
# Of a source whose blocks cannot be read: the request may be paused meanwhile.
_WHY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Round:
    """One finished round. Times of the monotonic clock."""

    state: types_pb2.MigrationState.ValueType
    message: worker_pb2.CopyRound
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Paused:
    """The request as the source paused it, with all of its KV here."""

    pause: ExportedPause
    # When it was paused, on this machine's monotonic clock; includes the way of the command.
    since_s: float
    # State as of the arrival here; None before the first answering token.
    answer_pace: worker_pb2.AnswerPace | None
    arrived_s: float
    # When the request arrived at its front end, on this machine's monotonic clock; None: not known.
    request_arrived_s: float | None

    @staticmethod
    def of(paused: worker_pb2.ExportPaused, pause: ExportedPause, requested_s: float, now_s: float) -> Paused:
        """Return the request as the source's message, of which `pause` was made, says; asked for at
        `requested_s`."""
        return Paused(
            pause,
            requested_s + pause.waited_s,
            paused.answer_pace if paused.HasField("answer_pace") else None,
            now_s,
            now_s - paused.since_arrival_s if paused.HasField("since_arrival_s") else None,
        )


class Copying:
    """Pull one export's blocks into the engine's reservation."""

    def __init__(
        self,
        engine: Engine,
        transfer: BlockTransfer,
        source: SourceLink,
        faults: Faults,
        request_id: str,
        on_round: Callable[[Round], None],
        link: LinkBudget | None,
        held: int = 0,
    ) -> None:
        """`link`: limits background copies while the source decodes; None: no limit.

        `held`: number of leading blocks that are here already.
        """
        self._engine = engine
        self._transfer = transfer
        self._source = source
        self._faults = faults
        self._request_id = request_id
        self._on_round = on_round
        self._link = link
        self._have = held
        self._rounds = 0
        self._pausing = False

    async def run(self, opened: worker_pb2.ExportOpened, plan: ImportPlan) -> Paused:
        """Run all rounds and the pause; when this returns, the engine is prepared."""
        if plan.rounds:
            await self._pre_copy(block_hashes(opened.blocks)[self._have :], plan)
        return await self._stop_and_copy()

    async def _pre_copy(self, hashes: list[bytes], plan: ImportPlan) -> None:
        """Copy what exists while the source decodes, then what was added meanwhile, until little is left."""
        await self._faults.hold("import:pre_copy")
        for _ in range(plan.rounds):
            if hashes:
                await self._round(types_pb2.MIGRATION_STATE_PRE_COPY, hashes)
            more = worker_pb2.ExportMore(have_blocks=self._have)
            event = await self._source.ask(worker_pb2.ExportCommand(more=more))
            if event.WhichOneof("body") != "blocks" or event.blocks.first_block != self._have:
                raise SourceLost("the source did not reply with the requested blocks")
            copied = len(hashes)
            hashes = block_hashes(event.blocks.blocks)
            # As many blocks were added as this round copied: another round would not reduce the rest.
            if len(hashes) <= plan.stop_blocks or len(hashes) >= copied > 0:
                return

    async def _stop_and_copy(self) -> Paused:
        requested_s = time.monotonic()
        self._pausing = True
        command = worker_pb2.ExportPause(have_blocks=self._have)
        event = await self._source.ask(worker_pb2.ExportCommand(pause=command))
        if event.WhichOneof("body") != "paused" or event.paused.first_block != self._have:
            raise SourceLost("the source did not reply with the requested blocks")
        pause, arrived_s = pause_of(event.paused), time.monotonic()
        await self._faults.hold("import:paused")
        await self._round(types_pb2.MIGRATION_STATE_STOP_AND_COPY, pause.block_hashes)
        await run_to_completion(self._engine.import_prepare(self._request_id, pause))
        return Paused.of(event.paused, pause, requested_s, arrived_s)

    async def _round(self, state: types_pb2.MigrationState.ValueType, hashes: list[bytes]) -> None:
        began_s = time.monotonic()
        await run_to_completion(self._engine.import_reserve(self._request_id, self._have + len(hashes)))
        # No limit during the pause, in which the request does not run.
        pre_copy = state == types_pb2.MIGRATION_STATE_PRE_COPY
        if self._link is not None and pre_copy:
            size = 0
            for start in range(0, len(hashes), _SLICE_BLOCKS):
                await self._link.wait_for_budget()
                with self._link.transfer():
                    size += await self._pull(hashes[start : start + _SLICE_BLOCKS])
        else:
            size = await self._pull(hashes)
        self._rounds += 1
        ended_s = time.monotonic()
        message = worker_pb2.CopyRound(
            number=self._rounds, blocks=len(hashes), bytes=size, ms=(ended_s - began_s) * _MS
        )
        self._on_round(Round(state, message, began_s, ended_s))

    async def _pull(self, hashes: Sequence[bytes]) -> int:
        try:
            size = await self._transfer.pull(self._have, hashes)
        except KvTransferError:
            await self._ask_why()
            raise
        self._have += len(hashes)
        return size

    async def _ask_why(self) -> None:
        """Let the source say why its blocks cannot be read: mostly because the request has ended. Raise
        SourceFailed or SourceLost, and return if it knows of no reason."""
        if self._pausing:
            # It says by itself that a paused request was aborted.
            await told_why(self._source)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WHY_S):
                more = worker_pb2.ExportMore(have_blocks=self._have)
                await self._source.ask(worker_pb2.ExportCommand(more=more))


async def told_why(source: SourceLink) -> None:
    """Let a source that has ended its export by itself say why. Raise SourceFailed or SourceLost, and return
    if it has not ended it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_WHY_S):
            await source.failure()


async def stop_to_replay(source: SourceLink, faults: Faults) -> Paused:
    """Stop the request at its source. Raise SourceLost or SourceFailed."""
    requested_s = time.monotonic()
    event = await source.ask(worker_pb2.ExportCommand(pause=worker_pb2.ExportPause(replay=True)))
    if event.WhichOneof("body") != "paused":
        raise SourceLost("the source did not stop the request")
    pause, arrived_s = pause_of(event.paused), time.monotonic()
    await faults.hold("import:paused")
    return Paused.of(event.paused, pause, requested_s, arrived_s)


def replay_submission(
    opened: worker_pb2.ExportOpened, paused: Paused, key: RequestKey, request_id: str, epoch: int
) -> Submission:
    """Return a submission of the request with all its tokens to the target's engine."""
    return Submission(
        key=key,
        request_id=request_id,
        epoch=epoch,
        frames=list(opened.frames),
        output_token_ids=[*opened.output_token_ids, *paused.pause.new_output_token_ids],
        traceparent=opened.traceparent,
        frontend_id=opened.frontend_id,
        sampling_state=paused.pause.sampling_state,
        adapter_version=opened.adapter_version,
    )
