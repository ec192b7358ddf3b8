"""Suspects, requests that may have crashed an engine, run for one front end at a time."""

from __future__ import annotations

from tailrace.v1 import worker_pb2
from tests.worker.simulated import SMALL, request_frames
from tests.worker.test_attach import Attached, Worker, attached
from worker_agent.dispatch import AdmissionControl
from worker_agent.engine.base import RequestKey, Submission
from worker_agent.engine.simulated import SimulatedEngine


def answers(front: Attached) -> list[str]:
    """Return the replies to its submissions since the last call."""
    replies = []
    while not front.peer.down.empty():
        message: worker_pb2.AttachDown = front.peer.down.get_nowait()
        if message.HasField("taken"):
            replies.append(f"taken {message.taken.handle}")
        elif message.HasField("rejected"):
            replies.append(f"rejected {message.rejected.handle}")
    return replies


async def test_suspects_of_another_front_end_wait_for_progress() -> None:
    worker = Worker()
    engine = SimulatedEngine(SMALL)
    engine.faults.hang = True
    await engine.start(worker.sink)
    fronts = [await attached(worker, name) for name in ("a", "b")]
    admission = AdmissionControl(engine.submit, worker.front_ends, worker.running, worker.metrics, 100)

    def submit(front: int, handle: int, suspect: bool) -> list[str]:
        client, name = fronts[front].front_end.client, f"r{front}{handle}"
        admission.submit(
            Submission(RequestKey(client, handle), name, 0, request_frames(name, [65, 66]), suspect=suspect)
        )
        return answers(fronts[front])

    assert submit(0, 1, True) == ["taken 1"]
    # More suspects of the same front end are accepted, and so are requests that are no suspects.
    assert submit(0, 2, True) == ["taken 2"]
    assert submit(1, 1, False) == ["taken 1"]
    assert submit(1, 2, True) == ["rejected 2"]
    admission.clear_suspect(RequestKey(fronts[0].front_end.client, 1))
    assert submit(1, 2, True) == ["rejected 2"]
    # The other suspect ends.
    worker.running.remove(RequestKey(fronts[0].front_end.client, 2))
    assert submit(1, 2, True) == ["taken 2"]
    assert submit(0, 3, True) == ["rejected 3"]
    await engine.stop()
