"""Hands over what runs on draining instances, and tells how far that is."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Final

from tailrace.actions import Migrate
from tailrace.cluster import InstanceState, InstanceView, Phase, RequestState, RequestView
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.control.runner import Executor
from tailrace.v1 import admin_pb2

REASON: Final = "drain"
_POLL_S: Final = 0.25
# Migrations from one instance that are ordered and not over. The migration service carries out three at a
# time by default; for the others a target is chosen when their turn is near.
_OPEN_MAX: Final = 8
# A request that could not be moved is tried again after this long, and twice as long each time.
_RETRY_FIRST_S: Final = 2.0
_RETRY_MOST_S: Final = 16.0


@dataclass(slots=True)
class _Tried:
    times: int
    last_s: float


class Drainer:
    """Migrates each request until it has gone. Prompts that wait have no KV: their worker hands them back."""

    def __init__(self, state: ReportedCluster, executor: Executor, leading: asyncio.Event) -> None:
        self._state = state
        self._executor = executor
        self._leading = leading
        self._tried: dict[tuple[str, str], _Tried] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._leading.wait()
            self.look(time.monotonic())
            await asyncio.sleep(_POLL_S)

    def look(self, now_s: float) -> None:
        """Begin the migrations that are due."""
        view = self._state.view()
        draining = [i for i in view.instances.values() if i.state is InstanceState.DRAINING]
        # Tokens sent to each target in this look: one instance's requests must not all choose the same.
        sent: Counter[str] = Counter()
        for instance in draining:
            moves: list[Migrate] = []
            requests = self._state.requests_on(instance.instance_id)
            # Those that take new work and can take its KV; if there are none, those that can compute it anew.
            targets = self._state.view_of_kv(instance.instance_id).placeable()
            targets = targets or self._state.view_of_answers(instance.instance_id).placeable()
            room = _OPEN_MAX - sum(request.migrating for request in requests)
            for request in requests:
                if len(moves) >= room:
                    break
                target = _emptiest(targets, sent) if self._due(request, now_s) else None
                if target is not None:
                    sent[target] += request.context_tokens
                    moves.append(Migrate(request.request_id, instance.instance_id, target, REASON))
                    self._note(request, now_s)
            self._executor.submit(moves, REASON)
        present = {(r.request_id, i.instance_id) for i in draining for r in i.requests}
        self._tried = {key: tried for key, tried in self._tried.items() if key in present}

    def _due(self, request: RequestView, now_s: float) -> bool:
        if request.migrating or request.phase is Phase.PREFILL or request.state is RequestState.WAITING:
            return False
        tried = self._tried.get((request.request_id, request.instance_id))
        if tried is None:
            return True
        pause_s: float = min(_RETRY_FIRST_S * 2 ** (tried.times - 1), _RETRY_MOST_S)
        return now_s - tried.last_s >= pause_s

    def _note(self, request: RequestView, now_s: float) -> None:
        tried = self._tried.setdefault((request.request_id, request.instance_id), _Tried(0, now_s))
        tried.times += 1
        tried.last_s = now_s


def _emptiest(targets: Iterable[InstanceView], sent: Counter[str]) -> str | None:
    def filled(instance: InstanceView) -> tuple[float, str]:
        tokens = instance.kv_used_tokens + instance.prefill_backlog_tokens + sent[instance.instance_id]
        return tokens / max(1, instance.kv_capacity_tokens), instance.instance_id

    best = min(targets, key=filled, default=None)
    return None if best is None else best.instance_id


_PROGRESS_POLL_S: Final = 0.2
# A request placed just before the drain shows in a report by then.
_SETTLED_S: Final = 1.0


async def progress(state: ReportedCluster, instance_id: str) -> AsyncIterator[admin_pb2.DrainEvent]:
    """An event at each change, the last one when the instance is empty or has left the cluster."""
    began_s = time.monotonic()
    told: tuple[int, int, bool] | None = None
    while (tracked := state.tracked(instance_id)) is not None:
        requests = state.requests_on(instance_id)
        moving = sum(request.migrating for request in requests)
        view = state.view().instances[instance_id]
        suspect = view.state is InstanceState.SUSPECT
        if not requests and not suspect and tracked.heard_s > began_s + _SETTLED_S:
            yield admin_pb2.DrainEvent(remaining=0, message=f"{instance_id} is empty", done=True)
            return
        if (len(requests), moving, suspect) != told:
            told = (len(requests), moving, suspect)
            yield admin_pb2.DrainEvent(remaining=len(requests), message=_message(instance_id, *told))
        await asyncio.sleep(_PROGRESS_POLL_S)
    yield admin_pb2.DrainEvent(remaining=0, message=f"{instance_id} has left the cluster", done=True)


def _message(instance_id: str, remaining: int, moving: int, suspect: bool) -> str:
    doubt = "; it does not report" if suspect else ""
    return f"{instance_id}: {remaining} requests left, {moving} moving{doubt}"
