"""Copies of prefixes ahead of need yield to transfers that users wait for."""

from __future__ import annotations

import asyncio

from tailrace.v1 import cache_pb2
from tests.worker.test_pulls import HOLDER, Worker
from worker_agent.engine.base import Frames
from worker_agent.prefixes import Copies, PromptUnknown, PullOutcome

REQUEST = cache_pb2.CopyRequest(
    request_id="asked", holder_instance_id="holder", holder_address=HOLDER.address, tokens=8
)


async def prompt(address: str, request_id: str) -> Frames:
    """Return the one request of the holder."""
    if (address, request_id) != (HOLDER.address, "asked"):
        raise PromptUnknown("no such request")
    return [b"frames"]


class Target(Worker):
    """A worker that copies."""

    def __init__(self) -> None:
        super().__init__()
        self.importing = 0
        self.copies = Copies(self.pulls, prompt, lambda: self.importing, self.metrics)

    async def start_copy(self) -> asyncio.Task[PullOutcome]:
        """Start a copy and wait until its transfer has begun."""
        task = asyncio.create_task(self.copies.copy(REQUEST))
        while not self.transfer.begun:  # noqa: ASYNC110 - it takes a few iterations of the loop
            await asyncio.sleep(0)
        return task


async def test_copied_prefix_is_found_without_running_a_request() -> None:
    target = Target()
    target.transfer.gate.set()
    outcome = await target.copies.copy(REQUEST)
    assert (outcome.result, outcome.blocks) == ("pulled", 2)
    assert not target.engine.found and +target.metrics.copies == {"pulled": 1} and not +target.metrics.pulls
    target.submit("first", HOLDER)
    assert await target.drained() == {"first": 2}
    assert (await target.copies.copy(REQUEST)).result == "held"


async def test_requests_with_the_prefix_wait_for_the_copy() -> None:
    target = Target()
    copy = await target.start_copy()
    target.submit("first", HOLDER)
    target.transfer.gate.set()
    assert await target.drained() == {"first": 2}
    assert (await copy).result == "pulled" and target.transfer.begun == 1
    assert +target.metrics.pulls == {"shared": 1}


async def test_one_copy_at_a_time_and_none_while_users_wait() -> None:
    target = Target()
    copy = await target.start_copy()
    assert (await target.copies.copy(REQUEST)).result == "busy"
    target.transfer.gate.set()
    assert (await copy).result == "pulled"
    target.importing = 1
    assert (await target.copies.copy(REQUEST)).result == "busy"
    target.importing = 0
    target.transfer.gate.clear()
    target.engine.kept.clear()
    target.submit("first", HOLDER)
    assert (await target.copies.copy(REQUEST)).result == "busy"
    target.transfer.gate.set()
    await target.drained()


async def test_cancelled_copy_leaves_nothing_behind() -> None:
    target = Target()
    copy = await target.start_copy()
    copy.cancel()
    await asyncio.gather(copy, return_exceptions=True)
    assert copy.cancelled() and not target.engine.kept
    target.transfer.gate.set()
    assert (await target.copies.copy(REQUEST)).result == "pulled"


async def test_copy_of_a_request_that_has_left_the_holder() -> None:
    target = Target()
    unknown = cache_pb2.CopyRequest(request_id="gone", holder_address=HOLDER.address, tokens=8)
    assert (await target.copies.copy(unknown)).result == "gone"
    assert +target.metrics.copies == {"gone": 1} and not target.transfer.begun
