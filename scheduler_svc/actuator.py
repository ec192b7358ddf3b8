"""Carries out what a policy decided."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from scheduler_svc.active_policy import ActivePolicy
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.mover import Mover
from scheduler_svc.negotiator import CannotNegotiate, Negotiator
from scheduler_svc.refused import Refused
from scheduler_svc.settings import Settings
from scheduler_svc.state import ClusterState
from tailrace.actions import Action, Migrate, SetPool, SetStages
from tailrace.store.errors import StoreUnavailable
from tailrace.v1 import types_pb2, worker_pb2

log = logging.getLogger(__name__)

# Actions under way at once. Migrations beyond the migration service's own limits wait there, not here.
_OPEN_MAX: Final = 512


class Actuator:
    """Owns one task an action. One that cannot be done is dropped: the policy will see and decide anew."""

    def __init__(
        self,
        state: ClusterState,
        active: ActivePolicy,
        mover: Mover,
        negotiator: Negotiator,
        settings: Settings,
        metrics: SchedulerMetrics,
    ) -> None:
        self._state = state
        self._active = active
        self._negotiator = negotiator
        self._mover = mover
        self._settings = settings
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, actions: Sequence[Action], policy: str) -> None:
        """Begin to carry out what was decided in one go; no wait."""
        for action in without_swaps(actions):
            kind = type(action).__name__
            if len(self._tasks) >= _OPEN_MAX:
                self._metrics.actions.labels(kind, "dropped").inc()
                continue
            task = asyncio.create_task(self._carry_out(action, policy), name=f"action {kind}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop. Migrations go on in the migration service."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, action: Action, policy: str) -> None:
        kind, outcome = type(action).__name__, "failed"
        try:
            outcome = await self._do(action, policy)
        except (Refused, StoreUnavailable) as error:
            log.info("%s by %s: %s", kind, policy, error)
            outcome = "refused"
        except Exception:
            # A mistake of ours: said, counted as failed, and the next action goes on.
            log.exception("%s by %s failed", kind, policy)
        finally:
            self._metrics.actions.labels(kind, outcome).inc()

    async def _do(self, action: Action, policy: str) -> str:
        match action:
            case Migrate():
                return await self._migrate(action, policy)
            case SetPool():
                view = self._state.view().instances.get(action.instance_id)
                expected = view.pool if view is not None else None
                await self._settings.swap_pool(action.instance_id, expected, action.pool)
            case SetStages():
                await self._settings.swap_stages(self._state.view().stages, action.stages)
        return "done"

    async def _migrate(self, action: Migrate, policy: str) -> str:
        request = self._state.request(action.request_id)
        if request is None or request.instance_id != action.source_id:
            return "outdated"
        takers = self._takers(action, policy)
        if takers:
            try:
                moved = await self._negotiator.offer(request, takers, action.reason, policy)
                return "committed" if moved else "aborted"
            except CannotNegotiate as error:
                log.debug("%s does not negotiate; its request goes where the view says", error)
        last = types_pb2.MIGRATION_STATE_UNSPECIFIED
        records = self._mover.move(
            request, action.target_id, action.reason, policy, worker_pb2.COPY_MODE_PRE_COPY
        )
        async for record in records:
            last = record.state
        return "committed" if last == types_pb2.MIGRATION_STATE_COMMITTED else "aborted"

    def _takers(self, action: Migrate, policy: str) -> Sequence[str]:
        """Who may be asked; nobody once another policy decides, or when this one fails."""
        if self._active.name != policy:
            return ()
        try:
            return self._active.policy.takers(self._state.view(), action)
        except Exception:
            log.exception("policy %s failed to name takers", policy)
            self._metrics.policy_errors.labels(policy, "takers").inc()
            return ()


def without_swaps(actions: Sequence[Action]) -> list[Action]:
    """Leave out a migration B->A where A->B was decided before it, and a second one of the same request."""
    pairs: set[tuple[str, str]] = set()
    requests: set[str] = set()
    kept: list[Action] = []
    for action in actions:
        if isinstance(action, Migrate):
            if (action.target_id, action.source_id) in pairs or action.request_id in requests:
                continue
            pairs.add((action.source_id, action.target_id))
            requests.add(action.request_id)
        kept.append(action)
    return kept
