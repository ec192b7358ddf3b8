"""Hands over what runs on draining instances, for as long as this scheduler leads."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from scheduler_svc.decider import Hands
from scheduler_svc.state import ClusterState
from tailrace.actions import Migrate
from tailrace.cluster import ClusterView, InstanceState, InstanceView, Phase, RequestView

REASON: Final = "drain"
_LOOK_S: Final = 0.25
_TRIES: Final = 3
_RETRY_S: Final = 2.0


@dataclass(slots=True)
class _Tried:
    times: int
    last_s: float


class Drainer:
    """Moves each request at most three times; one that cannot be moved finishes where it is."""

    def __init__(self, state: ClusterState, hands: Hands, leading: asyncio.Event) -> None:
        self._state = state
        self._hands = hands
        self._leading = leading
        self._tried: dict[tuple[str, str], _Tried] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._leading.wait()
            self.look(time.monotonic())
            await asyncio.sleep(_LOOK_S)

    def look(self, now_s: float) -> None:
        """Begin the migrations that are due."""
        view = self._state.view()
        draining = [i for i in view.instances.values() if i.state is InstanceState.DRAINING]
        # Tokens sent to each target in this look: one instance's requests must not all choose the same.
        sent: Counter[str] = Counter()
        for instance in draining:
            moves: list[Migrate] = []
            for request in self._state.requests_on(instance.instance_id):
                target = self._target(view, sent) if self._due(request, now_s) else None
                if target is not None:
                    sent[target] += request.context_tokens
                    moves.append(Migrate(request.request_id, instance.instance_id, target, REASON))
                    self._note(request, now_s)
            self._hands.submit(moves, REASON)
        present = {(r.request_id, i.instance_id) for i in draining for r in i.requests}
        self._tried = {key: tried for key, tried in self._tried.items() if key in present}

    def _due(self, request: RequestView, now_s: float) -> bool:
        if request.migrating or request.phase is Phase.PREFILL:
            return False
        tried = self._tried.get((request.request_id, request.instance_id))
        return tried is None or (tried.times < _TRIES and now_s - tried.last_s >= _RETRY_S)

    def _target(self, view: ClusterView, sent: Counter[str]) -> str | None:
        candidates = view.placeable()
        if not candidates:
            return None

        def filled(instance: InstanceView) -> tuple[float, str]:
            tokens = instance.kv_used_tokens + instance.prefill_backlog_tokens + sent[instance.instance_id]
            return tokens / max(1, instance.kv_capacity_tokens), instance.instance_id

        return min(candidates, key=filled).instance_id

    def _note(self, request: RequestView, now_s: float) -> None:
        tried = self._tried.setdefault((request.request_id, request.instance_id), _Tried(0, now_s))
        tried.times += 1
        tried.last_s = now_s
