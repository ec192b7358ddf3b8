"""Limits of front ends and workers, and the refusals of requests beyond them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from frontend_svc import requests
from frontend_svc.admission import CONGESTED, NO_INSTANCE, TOO_MANY_REQUESTS, AdmissionState, Refusal
from frontend_svc.answers.opening import SUPERSEDED
from frontend_svc.engine import MAX_CONGESTED, UNREAD_FULL_BYTES, UNREAD_MAX_BYTES
from frontend_svc.settings import Limits
from tailrace.v1 import worker_pb2
from tailrace.wire.outputs import FinishReason
from tests.frontend.conftest import Rig, eventually, place_wait_ends
from tests.frontend.fleet import record
from tests.frontend.scripted_worker import FINISHED, ScriptedWorker, outputs
from tests.frontend.simulated_worker import SimulatedWorker
from tests.waiting import WAIT_S
from worker_agent.engine.simulated import SimulatedFaults, SimulatedSettings

MIB = 1 << 20


async def refusal_of(rig: Rig, request_id: str) -> Refusal | None:
    """Return why the request ended without an answer."""
    end = await rig.front.end_of(request_id)
    assert end.finish_reason == FinishReason.ERROR
    return Refusal.decode(end.stop_reason)


def rejected(
    submit: worker_pb2.Submit, code: worker_pb2.RejectCode.ValueType, reason: str = ""
) -> worker_pb2.AttachDown:
    return worker_pb2.AttachDown(
        rejected=worker_pb2.RequestRejected(
            handle=submit.handle, epoch=submit.epoch, code=code, reason=reason
        )
    )


def test_refusal_is_encoded_as_a_stop_reason() -> None:
    assert Refusal.decode(Refusal(413, "too: large").encode()) == Refusal(413, "too: large")
    for other in (None, 5, "stop", "tailrace:", "tailrace:x:y"):
        assert Refusal.decode(other) is None


async def finish(rig: Rig, worker: ScriptedWorker, submit: worker_pb2.Submit) -> None:
    """Complete the request and check its finish reason."""
    worker.send(outputs(submit, [7], len(submit.output_token_ids), FINISHED))
    assert (await rig.front.end_of(submit.request_id)).finish_reason == FinishReason.STOP


async def test_request_too_large_for_every_worker_is_refused_before_placement(rig: Rig) -> None:
    worker = await rig.worker("a", max_message_bytes=2 * MIB)
    await rig.front.ready()
    await rig.front.add("running")
    running = await worker.submitted()
    await rig.front.add("large", extra_args={"pad": "x" * 3 * MIB})
    refusal = await refusal_of(rig, "large")
    assert refusal is not None and refusal.status == 413 and str(2 * MIB) in refusal.message
    await rig.front.add("next")
    # The worker never received it, the connection is the same, and the running request continues.
    submit = await worker.submitted()
    assert submit.request_id == "next"
    await finish(rig, worker, submit)
    await finish(rig, worker, running)
    assert running.epoch == 0 and rig.count("refused_requests_total", status="413") == 1


async def test_request_goes_to_a_worker_that_accepts_its_size(rig: Rig) -> None:
    # By load and name alone the fallback would choose the first one.
    await rig.worker("a", max_message_bytes=MIB)
    large = await rig.worker("b", max_message_bytes=8 * MIB)
    await rig.front.ready()
    await rig.front.add("large", extra_args={"pad": "x" * 3 * MIB})
    await finish(rig, large, await large.submitted())


async def test_too_large_reply_ends_only_its_request(rig: Rig) -> None:
    worker, other = await rig.worker("a"), await rig.worker("b")
    await rig.front.ready()
    await rig.front.add("large")
    large = await worker.submitted()
    await rig.front.add("other")
    neighbour = await other.submitted()
    # A rejection of a past epoch is ignored.
    stale = worker_pb2.Submit(handle=large.handle, epoch=large.epoch + 1)
    worker.send(rejected(stale, worker_pb2.REJECT_CODE_REPLY_TOO_LARGE))
    worker.send(rejected(large, worker_pb2.REJECT_CODE_REPLY_TOO_LARGE, "30 MB of log-probabilities"))
    refusal = await refusal_of(rig, "large")
    assert refusal == Refusal(400, "The request failed: 30 MB of log-probabilities.")
    await finish(rig, other, neighbour)
    await rig.front.add("next")
    await finish(rig, worker, await worker.submitted())
    assert rig.count("recoveries_total", cause="lost") == 0


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"prompt_logprobs": 2}, "the simulated engine has no prompt log probabilities"),
        ({"extra_args": {"reasoning_tokens": "many"}}, "reasoning_tokens"),
    ],
)
async def test_what_no_engine_can_run_ends_at_once_with_the_reason(
    rig: Rig, asked: dict[str, Any], reason: str
) -> None:
    workers = [SimulatedWorker(f"w{n}", SimulatedSettings(), SimulatedFaults(), False) for n in range(2)]
    for worker in workers:
        await rig.stack.enter_async_context(worker.running())
        rig.members.instances[worker.instance_id] = record(worker.instance_id, worker.address)
    rig.members.changed()
    await eventually(lambda: len(rig.engine.workers.attached()) == 2)
    await rig.front.ready()
    await rig.front.add("r", **asked)
    refusal = await refusal_of(rig, "r")
    assert refusal is not None and refusal.status == 400 and reason in refusal.message
    assert [name for worker in workers for name in worker.submitted] == ["r"]
    assert rig.count("recoveries_total", cause="failed") == 0


async def test_what_one_engine_cannot_run_is_tried_elsewhere_and_ends_with_the_reason(rig: Rig) -> None:
    workers = [await rig.worker("a"), await rig.worker("b")]
    await rig.front.ready()
    await rig.front.add("r")
    for attempt in range(4):
        submit = await workers[attempt % 2].submitted()
        workers[attempt % 2].send(rejected(submit, worker_pb2.REJECT_CODE_FAILED, f"no adapter {attempt}"))
    refusal = await refusal_of(rig, "r")
    assert refusal == Refusal(500, "The request failed: it failed 4 times, last on b: no adapter 3.")
    assert rig.count("recoveries_total", cause="failed") == 4


async def test_busy_worker_is_skipped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "BUSY_S", WAIT_S)
    full, other = await rig.worker("a"), await rig.worker("b")
    await rig.front.ready()
    await rig.front.add("r")
    full.send(rejected(await full.submitted(), worker_pb2.REJECT_CODE_BUSY))
    submit = await other.submitted()
    assert (submit.request_id, submit.epoch) == ("r", 1)
    # For a moment it gets no other requests either, although it has the fewest.
    await rig.front.add("s")
    assert (await other.submitted()).request_id == "s"
    assert full.received.empty() and rig.count("recoveries_total", cause="busy") == 1


async def test_a_request_of_a_superseded_run_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.engine.outputs, "join_run", lambda run, request_id: SUPERSEDED)
    await rig.worker("a")
    await rig.front.ready()
    await rig.front.add("r")
    assert await refusal_of(rig, "r") == SUPERSEDED
    assert rig.count("refused_requests_total", status="409") == 1


@place_wait_ends
async def test_request_is_refused_at_its_deadline_when_all_workers_are_busy(rig: Rig) -> None:
    workers = [await rig.worker("a"), await rig.worker("b")]
    for worker in workers:
        # A worker rejects only requests that its engine has not accepted.
        worker.confirms = False
    await rig.front.ready()

    async def reject_all(worker: ScriptedWorker) -> None:
        while True:
            worker.send(rejected(await worker.submitted(), worker_pb2.REJECT_CODE_BUSY))

    tasks = [asyncio.create_task(reject_all(worker)) for worker in workers]
    began_s = time.monotonic()
    await rig.front.add("r")
    assert await refusal_of(rig, "r") == NO_INSTANCE
    waits = (time.monotonic() - began_s) // requests.BUSY_S
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # The request is retried at intervals, not as fast as messages travel.
    assert 2 <= rig.count("recoveries_total", cause="busy") <= len(workers) * (1 + waits)


@pytest.mark.parametrize("limits", [Limits(max_streams=2)])
async def test_streams_beyond_the_limit_are_refused_with_429(rig: Rig, limits: Limits) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    submits = []
    for name in ("r", "s"):
        await rig.front.add(name)
        submits.append(await worker.submitted())
    await rig.front.add("t")
    assert await refusal_of(rig, "t") == TOO_MANY_REQUESTS
    assert rig.admission.read() is AdmissionState.FULL
    await finish(rig, worker, submits[0])
    await eventually(lambda: rig.admission.read() is AdmissionState.OPEN)
    await rig.front.add("u")
    await finish(rig, worker, await worker.submitted())


@pytest.mark.parametrize("limits", [Limits(max_unplaced=2)])
async def test_unplaced_requests_beyond_the_limit_are_refused_with_503(rig: Rig, limits: Limits) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    rig.members.draining = frozenset({"a"})
    rig.members.changed()
    for name in ("r", "s", "t"):
        await rig.front.add(name)
    # Immediately, while the others still wait.
    assert await refusal_of(rig, "t") == NO_INSTANCE
    assert len(rig.engine.table) == 2
    rig.members.draining = frozenset()
    rig.members.changed()
    for _ in range(2):
        await finish(rig, worker, await worker.submitted())


async def test_congested_request_is_placed_again_and_then_gets_503(rig: Rig) -> None:
    workers = {name: await rig.worker(name) for name in ("a", "b")}
    await rig.front.ready()
    await rig.front.add("r")
    for attempt in range(MAX_CONGESTED + 1):
        # Of two workers, it goes to the one that did not reject it just now.
        worker = workers["ab"[attempt % 2]]
        submit = await worker.submitted()
        assert list(submit.output_token_ids) == list(range(attempt))
        worker.send(outputs(submit, [attempt], attempt))
        await rig.front.tokens_of("r", attempt + 1)
        worker.send(rejected(submit, worker_pb2.REJECT_CODE_CONGESTED, "unread"))
    assert await refusal_of(rig, "r") == CONGESTED
    assert rig.front.tokens["r"] == list(range(MAX_CONGESTED + 1))


async def test_congested_request_that_ran_for_long_waits_for_its_only_instance(rig: Rig) -> None:
    """Its wait limit starts when it loses the instance, not when it was placed there."""
    worker = await rig.worker("a")
    await rig.front.ready()
    await rig.front.add("r")
    submit = await worker.submitted()
    worker.send(outputs(submit, [1], 0))
    await rig.front.tokens_of("r", 1)
    stream = rig.engine.table.find("r")
    assert stream is not None
    stream.placing_since_s -= 3600.0
    worker.send(rejected(submit, worker_pb2.REJECT_CODE_CONGESTED, "unread"))
    again = await worker.submitted()
    assert list(again.output_token_ids) == [1]
    await finish(rig, worker, again)


async def test_slow_api_server_sheds_requests_and_is_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    for request_id in ("old", "new"):
        await rig.front.add(request_id)
    old, new = await worker.submitted(), await worker.submitted()
    unread = UNREAD_FULL_BYTES + 1
    monkeypatch.setattr(rig.engine.outputs._output, "_unread_bytes", lambda: unread)
    await eventually(lambda: rig.admission.read() is AdmissionState.FULL)
    assert len(rig.engine.table) == 2
    unread = UNREAD_MAX_BYTES + 1
    rig.engine.tick()
    unread = 0
    assert list((await worker.expect("abort")).abort.handles) == [new.handle]
    assert await refusal_of(rig, "new") == CONGESTED
    await finish(rig, worker, old)
    await eventually(lambda: rig.admission.read() is AdmissionState.OPEN)
