"""Carry out the actions of a policy: migrations, offers, returns of prompts, prefix copies, pool and stage
changes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from scheduler_svc.admin.errors import AdminError
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.migrations import MigrationStarter
from scheduler_svc.settings import ETCD_LAG_S, Conflict, Settings
from tailrace.actions import (
    Action,
    CopyPrefix,
    Migrate,
    Offer,
    ReturnPrompts,
    SetPool,
    SetStages,
    WhenFull,
    could_only_wait,
)
from tailrace.bid_ask import OFFER_S
from tailrace.cluster import RequestView, Stage
from tailrace.control.events import (
    CopyOrdered,
    CopySettled,
    MigrationClosed,
    MigrationOpened,
    PoolOrdered,
    PoolSettled,
)
from tailrace.control.reported_cluster import PoolOrder, ReportedCluster
from tailrace.records import InstanceRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded
from tailrace.service.tasks import cancel
from tailrace.store.client import StoreUnavailable
from tailrace.store.store import SWAPS_MAX
from tailrace.telemetry.incidents import LimitedLog, loop_failed, loop_named
from tailrace.v1 import bidask_pb2, bidask_pb2_grpc, cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


# Longer than a worker keeps an offer open.
_OFFER_S: Final = OFFER_S + 15.0
_CALL_S: Final = 2.0
# Longer than a worker's default limit of a pull; the worker stops when the call ends.
_COPY_S: Final = 10.0
_LOOP: Final = loop_named("actions")
# Concurrent actions; pool moves that are written together count as one. Migrations beyond the migration
# service's own limits wait there, not here.
_OPEN_MAX: Final = 512
# Transactions of pool moves at a time. Placements may decide one each: hundreds of calls of etcd together
# exceed their deadlines, and placements wait behind them.
_POOL_WRITES: Final = 32
# How long one waits for others' writes: without etcd, hundreds would keep all other actions from being begun
# for as long as their calls take one after another.
_POOL_TURN_S: Final = 5.0
_PRECONDITION: Final = grpc.StatusCode.FAILED_PRECONDITION


class Actuator:
    """Run one task per action. An action that cannot be carried out is dropped: the policy sees that and
    decides again."""

    def __init__(
        self,
        state: ReportedCluster,
        migration_starter: MigrationStarter,
        workers: WorkerCalls,
        settings: Settings,
        metrics: SchedulerMetrics,
    ) -> None:
        self._state = state
        self._workers = workers
        self._migration_starter = migration_starter
        self._settings = settings
        self._metrics = metrics
        self._refusals = LimitedLog(log)
        self._pool_writes = asyncio.Semaphore(_POOL_WRITES)
        self._turns = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE) -> None:
        """Begin to carry out actions that were decided together; does not wait.

        Pool moves and migrations are in the model at once, so that the next decision, even one on the same
        report, takes them into account. `when_full` applies to the migrations.
        """
        orders: list[PoolOrder] = []
        for action in without_swaps(actions):
            kind = type(action).__name__
            if len(self._tasks) >= _OPEN_MAX:
                self._metrics.actions.labels(kind, "dropped").inc()
                continue
            with self._recorded(kind, policy):
                if isinstance(action, SetPool):
                    orders.append(self._order_pool(action))
                else:
                    work = self._begin(action, policy, when_full)
                    self._start(kind, self._carry_out(kind, policy, work))
        for first in range(0, len(orders), SWAPS_MAX):
            self._start(SetPool.__name__, self._set_pools(orders[first : first + SWAPS_MAX], policy))

    async def close(self) -> None:
        """Cancel all actions. Migrations continue in the migration service."""
        await cancel(*self._tasks)

    def _start(self, kind: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=f"action {kind}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin(
        self,
        action: Migrate | Offer | ReturnPrompts | CopyPrefix | SetStages,
        policy: str,
        when_full: WhenFull,
    ) -> Coroutine[None, None, str]:
        """Enter the action into the model; return a coroutine that carries it out and returns its outcome.

        Raise AdminError.
        """
        match action:
            case Migrate():
                return self._begin_migration(action, policy, when_full)
            case Offer():
                return self._begin_offer(action, policy)
            case ReturnPrompts():
                return self._return(action)
            case CopyPrefix():
                return self._workers.copy(action)
            case SetStages():
                return self._set_stages(action, self._state.view().stages)

    async def _carry_out(self, kind: str, policy: str, work: Coroutine[None, None, str]) -> None:
        try:
            with self._recorded(kind, policy):
                await self._turn()
                self._metrics.actions.labels(kind, await work).inc()
        finally:
            # If it was cancelled before its turn, which only `close` does: the model goes with it.
            work.close()

    @contextmanager
    def _recorded(self, kind: str, policy: str, count: int = 1) -> Iterator[None]:
        """Record an error of the block as that of `count` actions; others are carried out nevertheless."""
        try:
            yield
        except (AdminError, StoreUnavailable) as error:
            self._record_refusal(kind, policy, error, count)
        except Exception as error:  # noqa: BLE001
            loop_failed(_LOOP, f"{kind} by {policy}", error)
            self._metrics.actions.labels(kind, "failed").inc(count)

    async def _turn(self) -> None:
        """Wait until the actions before have begun, no two in a round of the loop: those of a tick, begun all
        at once, would take as long as dozens of placements, which would wait."""
        async with self._turns:
            await asyncio.sleep(0)

    def _record_refusal(self, kind: str, policy: str, error: Exception, count: int = 1) -> None:
        # Without a migration service every order is refused, hundreds a second.
        of = error.code.name if isinstance(error, AdminError) else type(error).__name__
        self._refusals.write(logging.INFO, f"{kind} {policy} {of}", f"{kind} by {policy}: {error}")
        self._metrics.actions.labels(kind, "refused").inc(count)

    async def _return(self, action: ReturnPrompts) -> str:
        returned = await self._workers.return_prompts(action.instance_id, action.request_ids)
        return "done" if returned else "outdated"

    def _order_pool(self, action: SetPool) -> PoolOrder:
        """Enter a pool move into the model. Raise AdminError."""
        ordered = self._state.order(PoolOrdered(action.instance_id, action.pool))
        order = self._state.pool_order(action.instance_id) if ordered else None
        if order is None:
            raise AdminError(_PRECONDITION, f"{action.instance_id} is gone or has another pending order")
        return order

    async def _set_pools(self, orders: Sequence[PoolOrder], policy: str) -> None:
        """Write pool moves that were decided together, in one transaction: by itself, each would be a change
        that every process of the cluster reads."""
        kind, moved = SetPool.__name__, frozenset[str]()
        try:
            with self._recorded(kind, policy, len(orders)):
                await self._turn()
                moved = await self._write_pools(orders)
                self._metrics.actions.labels(kind, "done").inc(len(moved))
                for order in orders:
                    if order.instance_id not in moved:
                        self._record_refusal(kind, policy, Conflict(f"the pool of {order.instance_id}"))
        finally:
            self._settle_pools([order for order in orders if order.instance_id not in moved])
        # Etcd's watch delivers the moves in a moment, unless another writer has reverted them meanwhile.
        asyncio.get_running_loop().call_later(ETCD_LAG_S, self._settle_pools, orders)

    async def _write_pools(self, orders: Sequence[PoolOrder]) -> frozenset[str]:
        """Write the moves once it is their turn; return the ids of those that no other writer has changed.
        Raise AdminError or StoreUnavailable."""
        try:
            async with asyncio.timeout(_POOL_TURN_S):
                await self._pool_writes.acquire()
        except TimeoutError:
            message = f"{orders[0].instance_id}: the pool moves before it are not written yet"
            raise AdminError(grpc.StatusCode.DEADLINE_EXCEEDED, message) from None
        try:
            return await self._settings.swap_pools(orders)
        finally:
            self._pool_writes.release()

    def _settle_pools(self, orders: Sequence[PoolOrder]) -> None:
        """Remove orders that still count: their instances are where etcd says."""
        for order in orders:
            if self._state.pool_order(order.instance_id) is order:
                self._state.apply(PoolSettled(order.instance_id))

    async def _set_stages(self, action: SetStages, before: tuple[Stage, ...]) -> str:
        await self._settings.swap_stages(before, action.stages)
        return "done"

    def _begin_migration(
        self, action: Migrate, policy: str, when_full: WhenFull
    ) -> Coroutine[None, None, str]:
        request = self._state.request(action.request_id)
        if request is None or request.instance_id != action.source_id:
            return _outdated()
        target = self._state.tracked(action.target_id)
        if target is not None and could_only_wait(when_full, len(target.coming)):
            raise AdminError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{len(target.coming)} migrations to {action.target_id} are open",
            )
        order = self._migration_starter.order(request, action.target_id, action.reason, policy, when_full)
        return _outcome(order)

    def _begin_offer(self, action: Offer, policy: str) -> Coroutine[None, None, str]:
        request = self._state.request(action.request_id)
        if request is None or request.instance_id != action.source_id:
            return _outdated()
        return _outcome(self._workers.offer(request, action, policy))


async def _outdated() -> str:
    return "outdated"


async def _outcome(migrated: Coroutine[None, None, bool]) -> str:
    """Return how a migration ended."""
    return "committed" if await migrated else "aborted"


def without_swaps(actions: Sequence[Action]) -> list[Action]:
    """Drop each migration B->A decided after one A->B, and any second one of the same request."""
    pairs: set[tuple[str, str]] = set()
    requests: set[str] = set()
    kept: list[Action] = []
    for action in actions:
        if isinstance(action, Offer):
            if action.request_id in requests:
                continue
            requests.add(action.request_id)
        elif isinstance(action, Migrate):
            if (action.target_id, action.source_id) in pairs or action.request_id in requests:
                continue
            pairs.add((action.source_id, action.target_id))
            requests.add(action.request_id)
        kept.append(action)
    return kept


async def _reply(call: Awaitable[M], address: str) -> M:
    """Return a worker's reply. Raise AdminError."""
    try:
        return decoded(await call, address)
    except grpc.aio.AioRpcError as error:
        raise AdminError(error.code(), error.details() or error.code().name) from error


class WorkerCalls:
    """What the scheduler has workers do: offer a request, return waiting prompts, copy a prefix."""

    def __init__(self, state: ReportedCluster, channels: Channels) -> None:
        self._state = state
        self._channels = channels

    def offer(self, request: RequestView, offer: Offer, policy: str) -> Coroutine[None, None, bool]:
        """Enter the migration into the model; return a coroutine that has the request's worker find the
        instance that takes it over, by bid-ask, and returns whether one of the receivers did.

        Raise AdminError, immediately or when awaited.
        """
        source = self._state.tracked(request.instance_id)
        receivers = [
            tracked.record
            for name in offer.receiver_ids
            if (tracked := self._state.tracked(name)) is not None
            and self._state.can_exchange_kv(request.instance_id, name)
        ]
        if source is None or not receivers:
            raise AdminError(grpc.StatusCode.NOT_FOUND, "no instance to offer the request to")
        if not self._state.order(MigrationOpened(request, None)):
            raise AdminError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"request {request.request_id}: a migration of it is open",
            )
        return self._offer(source.record, receivers, request, offer, policy)

    async def _offer(
        self,
        source: InstanceRecord,
        receivers: Sequence[InstanceRecord],
        request: RequestView,
        offer: Offer,
        policy: str,
    ) -> bool:
        request_id = request.request_id
        try:
            # Made here, at this offer's turn: with dozens of receivers it takes a tenth of a millisecond.
            offered = bidask_pb2.OfferRequest(
                request_id=request_id,
                from_epoch=request.epoch,
                tokens=request.context_tokens,
                receivers=[
                    bidask_pb2.Receiver(instance_id=each.instance_id, address=each.address)
                    for each in receivers
                ],
                reason=offer.reason,
                policy=policy,
                most_tokens=offer.most_tokens,
                traceparent=self._state.traceparent(request_id),
            )
            stub = bidask_pb2_grpc.BidAskStub(self._channels.get(source.address, Role.WORKER))
            reply = await _reply(stub.Offer(offered, timeout=_OFFER_S), source.address)
        finally:
            self._state.apply(MigrationClosed(request_id))
        if not reply.taker_instance_id:
            log.debug("%s stays on %s: %s", request_id, source.instance_id, reply.reason)
        return bool(reply.taker_instance_id)

    async def return_prompts(self, instance_id: str, request_ids: tuple[str, ...]) -> int:
        """Have an instance return waiting prompts, to be placed where the policy now wants them; return how
        many it returns: those that still wait. Raise AdminError.

        The worker hands them to the front ends, which ask the scheduler; each prompt stays in its queue until
        then.
        """
        tracked = self._state.tracked(instance_id)
        if tracked is None:
            raise AdminError(grpc.StatusCode.NOT_FOUND, f"{instance_id} is gone")
        address = tracked.record.address
        stub = worker_pb2_grpc.WorkerStub(self._channels.get(address, Role.WORKER))
        request = worker_pb2.HandBackPromptsRequest(request_ids=request_ids)
        reply = await _reply(stub.HandBackPrompts(request, timeout=_CALL_S), address)
        return int(reply.returned)

    def copy(self, copy: CopyPrefix) -> Coroutine[None, None, str]:
        """Enter the copy into the model, at most one per target at a time; return a coroutine that carries it
        out and returns the worker's outcome.

        Raise AdminError, immediately or when awaited.
        """
        holder, target = self._state.tracked(copy.holder_id), self._state.tracked(copy.target_id)
        ordered = CopyOrdered(copy, time.monotonic())
        if holder is None or target is None or not self._state.order(ordered):
            raise AdminError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{copy.target_id} is receiving a copy already, or {copy.holder_id} has no {copy.request_id}",
            )
        request = cache_pb2.CopyRequest(
            request_id=copy.request_id,
            holder_instance_id=copy.holder_id,
            holder_address=holder.record.address,
            tokens=copy.tokens,
            target_instance_id=copy.target_id,
        )
        return self._copy(copy.target_id, target.record.address, request)

    async def _copy(self, target_id: str, address: str, request: cache_pb2.CopyRequest) -> str:
        stub = cache_pb2_grpc.CacheStub(self._channels.get(address, Role.WORKER))
        try:
            reply = await _reply(stub.Copy(request, timeout=_COPY_S), address)
        finally:
            self._state.apply(CopySettled(target_id, time.monotonic()))
        return reply.outcome
