"""The target's side of a replay: nothing is copied.

The source stops the request and sends the tokens it has generated; once the front end has accepted, they are
recomputed here.
"""

from __future__ import annotations

import time

from tailrace.v1 import worker_pb2
from worker_agent.engine.base import RequestKey, Submission
from worker_agent.faults import Faults
from worker_agent.migration.copying import Paused
from worker_agent.migration.messages import pause_of
from worker_agent.migration.source_link import SourceLink, SourceLost


async def stop(source: SourceLink, faults: Faults) -> Paused:
    """Stop the request at its source. Raise SourceLost or SourceFailed."""
    requested_s = time.monotonic()
    event = await source.ask(worker_pb2.ExportCommand(pause=worker_pb2.ExportPause(replay=True)))
    if event.WhichOneof("body") != "paused":
        raise SourceLost("the source did not stop the request")
    pause, arrived_s = pause_of(event.paused), time.monotonic()
    pace = event.paused.answer_pace if event.paused.HasField("answer_pace") else None
    await faults.hold("import:paused")
    return Paused(pause, requested_s + pause.waited_s, pace, arrived_s)


def submission(
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
