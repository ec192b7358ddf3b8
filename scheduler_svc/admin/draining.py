"""How far the draining of an instance is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

from tailrace.cluster import InstanceState
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.v1 import admin_pb2

_POLL_S: Final = 0.2
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
        await asyncio.sleep(_POLL_S)
    yield admin_pb2.DrainEvent(remaining=0, message=f"{instance_id} has left the cluster", done=True)


def _message(instance_id: str, remaining: int, moving: int, suspect: bool) -> str:
    doubt = "; it does not report" if suspect else ""
    return f"{instance_id}: {remaining} requests left, {moving} moving{doubt}"
