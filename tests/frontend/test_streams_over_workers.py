"""Each stream gets each token once and in order, whatever workers do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from frontend_svc.admission import NO_INSTANCE, NOT_HANDLED, AdmissionState, Refusal
from frontend_svc.streams import Stream
from tailrace.telemetry.incidents import UNREADABLE
from tailrace.v1 import worker_pb2
from tailrace.wire.outputs import EngineCoreOutput, FinishReason, encode_outputs, read_outputs
from tailrace.wire.requests import RequestType
from tests.counting import skipped
from tests.frontend.conftest import Rig, eventually, place_wait_ends
from tests.frontend.scripted_worker import FAILED, FINISHED, PREFILL_DONE, ScriptedWorker, merge, outputs


async def start(rig: Rig, request_id: str, *workers: ScriptedWorker) -> list[worker_pb2.Submit]:
    """Add one request per worker; the fallback placement assigns them in the order of names."""
    submits = []
    for number, worker in enumerate(workers):
        await rig.front.add(f"{request_id}{number}")
        submits.append(await worker.submitted())
    return submits


async def test_engine_forwards_the_workers_ready_response(rig: Rig) -> None:
    await rig.worker("a")
    assert (await rig.front.ready()).max_model_len == 8192


async def test_stream_from_add_to_end(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    (submit,) = await start(rig, "r", worker)
    assert (submit.request_id, submit.epoch, list(submit.output_token_ids)) == ("r0", 0, [])
    worker.send(outputs(submit, [10], 0, PREFILL_DONE))
    worker.send(outputs(submit, [11, 12], 1))
    worker.send(outputs(submit, [13], 3, FINISHED))
    assert (await rig.front.end_of("r0")).finish_reason == FinishReason.STOP
    assert rig.front.tokens["r0"] == [10, 11, 12, 13]
    assert rig.count("tokens_total") == 4
    assert rig.count("requests_total", outcome="finished") == 1


async def test_crash_in_mid_stream_loses_and_repeats_no_token(rig: Rig) -> None:
    first, second = await rig.worker("a"), await rig.worker("b")
    await rig.front.ready()
    mine, other = await start(rig, "r", first, second)
    first.send(outputs(mine, [10, 11], 0, PREFILL_DONE))
    second.send(outputs(other, [20], 0, PREFILL_DONE))
    await rig.front.tokens_of("r0", 2)
    await rig.front.tokens_of("r1", 1)
    await rig.crash(first)
    again = await second.submitted()
    assert (again.request_id, again.handle, again.epoch) == ("r0", mine.handle, 1)
    assert list(again.output_token_ids) == [10, 11]
    assert list(again.frames) == list(mine.frames)
    second.send(outputs(again, [12], 2, FINISHED))
    second.send(outputs(other, [21], 1, FINISHED))
    await rig.front.end_of("r0")
    await rig.front.end_of("r1")
    assert rig.front.tokens == {"r0": [10, 11, 12], "r1": [20, 21]}
    assert rig.count("recoveries_total", cause="lost") == 1


async def test_broken_link_is_reopened_and_its_streams_continue(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    (mine,) = await start(rig, "r", worker)
    submit, tokens = mine, [10]
    worker.send(outputs(mine, [10], 0, PREFILL_DONE))
    for epoch in (1, 2, 3):
        await rig.front.tokens_of("r0", epoch)
        worker.hang_up()
        submit = await worker.submitted()
        assert (submit.epoch, list(submit.output_token_ids)) == (epoch, tokens)
        tokens.append(10 + epoch)
        worker.send(outputs(submit, tokens[-1:], epoch))
    worker.send(outputs(submit, [99], 4, FINISHED))
    await rig.front.end_of("r0")
    assert rig.front.tokens["r0"] == [10, 11, 12, 13, 99]


async def test_malformed_outputs_restart_the_link(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    (mine,) = await start(rig, "r", worker)
    broken = outputs(mine, [10], 0)
    broken.outputs.counts[0] = 5
    worker.send(broken)
    again = await worker.submitted()
    assert (again.epoch, list(again.output_token_ids)) == (1, [])
    worker.send(outputs(again, [10], 0, FINISHED))
    await rig.front.end_of("r0")
    assert rig.front.tokens["r0"] == [10]


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"\xc1"], [b"\x81"], [msgspec.msgpack.encode([])], [b"\xff" * 9]], ids=repr
)
async def test_outputs_that_cannot_be_filtered_end_their_streams_alone(rig: Rig, frames: list[bytes]) -> None:
    """Their tokens are accepted, and cannot be shown: an error, not a gap. Other streams go on."""
    worker = await rig.worker("a")
    await rig.front.ready()
    (first,), (second,), (third,) = [await start(rig, name, worker) for name in "abc"]
    await rig.front.abort("a0")
    assert list((await worker.expect("abort")).abort.handles) == [first.handle]
    worker.send(merge(outputs(first, [10], 0), outputs(second, [10], 0), frames=frames))
    assert list((await worker.expect("abort")).abort.handles) == [second.handle]
    await rig.front.end_of("b0")
    worker.send(outputs(third, [11], 0, FINISHED))
    await rig.front.end_of("c0")
    assert rig.front.tokens["c0"] == [11]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"\x81"],
        *([msgspec.msgpack.encode(each)] for each in ([], [0, 7], [0, [[5, [1]]]], [0, [["a0", [-1]]]])),
        [msgspec.msgpack.encode([0, [["a0", [2**32]]]])],
        [msgspec.msgpack.encode([0, [["a0", [1], None, None, None, 77]]])],
    ],
    ids=repr,
)
async def test_outputs_that_no_api_server_can_read_end_their_streams_alone(
    rig: Rig, frames: list[bytes]
) -> None:
    """They do not reach the API server, which would give up all of its requests; other streams go on."""
    worker = await rig.worker("a")
    await rig.front.ready()
    (first,), (second,) = [await start(rig, name, worker) for name in "ab"]
    before = skipped("outputs of a worker")
    worker.send(merge(outputs(first, [10], 0), frames=frames))
    assert list((await worker.expect("abort")).abort.handles) == [first.handle]
    assert (await rig.front.end_of("a0")).finish_reason == FinishReason.ERROR
    assert skipped("outputs of a worker") == before + 1
    worker.send(outputs(second, [11], 0, FINISHED))
    await rig.front.end_of("b0")
    assert rig.front.tokens["b0"] == [11]


@pytest.mark.parametrize(
    "damage",
    [
        {"new_token_ids": [-1]},
        {"new_logprobs": b""},
        {"new_logprobs": [("<f4", [9], 7)] * 3},
        {"new_prompt_logprobs_tensors": [1, 2, 3]},
        {"pooling_output": ["float32", [7], 1]},
    ],
    ids=str,
)
async def test_only_the_stream_whose_output_no_api_server_can_read_ends(
    rig: Rig, damage: dict[str, object]
) -> None:
    """The others of the same step go on, each of their tokens once."""
    worker = await rig.worker("a")
    await rig.front.ready()
    (first,), (second,), (third,) = [await start(rig, name, worker) for name in "abc"]
    before = skipped("outputs of a worker")
    fields: dict[str, Any] = {"new_token_ids": [20]}
    fields |= {
        name: value if name == "new_token_ids" else msgspec.Raw(msgspec.msgpack.encode(value))
        for name, value in damage.items()
    }
    step = [
        EngineCoreOutput("a0", [10]),
        EngineCoreOutput("b0", **fields),
        EngineCoreOutput("c0", [30], finish_reason=FinishReason.STOP),
    ]
    sent = outputs(first, [10], 0), outputs(second, [20], 0), outputs(third, [30], 0, FINISHED)
    worker.send(merge(*sent, frames=encode_outputs(step)))
    assert list((await worker.expect("abort")).abort.handles) == [second.handle]
    assert (await rig.front.end_of("b0")).finish_reason == FinishReason.ERROR
    assert (await rig.front.end_of("c0")).finish_reason == FinishReason.STOP
    worker.send(outputs(first, [11], 1, FINISHED))
    assert (await rig.front.end_of("a0")).finish_reason == FinishReason.STOP
    assert rig.front.tokens["a0"] == [10, 11]
    assert rig.front.tokens["c0"] == [30]
    assert skipped("outputs of a worker") == before + 1


@pytest.mark.parametrize("number", [-1, 2**32, 1.5, "1"])
async def test_statistics_that_no_api_server_can_read_are_left_out(rig: Rig, number: object) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    (submit,) = await start(rig, "r", worker)
    before = skipped("outputs of a worker")
    stats = msgspec.Raw(msgspec.msgpack.encode({"num_prompt_tokens": number}))
    events = msgspec.Raw(msgspec.msgpack.encode([{"type": 9, "timestamp": number}]))
    output = EngineCoreOutput("r0", [10], finish_reason=FinishReason.STOP, prefill_stats=stats, events=events)
    wrong = [msgspec.msgpack.encode([0, [output], {"num_running_reqs": number}])]
    worker.send(merge(outputs(submit, [10], 0, FINISHED), frames=wrong))
    end = await rig.front.end_of("r0")
    assert end.finish_reason == FinishReason.STOP
    assert (bytes(end.prefill_stats), bytes(end.events)) == (b"\xc0", b"\xc0")
    assert rig.front.tokens["r0"] == [10]
    assert skipped("outputs of a worker") == before + 1


async def test_request_that_cannot_be_handled_fails_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    observer = rig.engine._observer
    arrived = observer.arrived

    def fail_once(stream: Stream, traceparent: str, chosen: str = "") -> None:
        monkeypatch.setattr(observer, "arrived", arrived)
        raise LookupError(f"nobody foresaw {stream.request_id}")

    monkeypatch.setattr(observer, "arrived", fail_once)
    await rig.front.add("wrong")
    end = await rig.front.end_of("wrong")
    assert Refusal.decode(end.stop_reason) == NOT_HANDLED
    assert len(rig.engine.table) == 0
    await rig.front.add("right")
    submit = await worker.submitted()
    worker.send(outputs(submit, [10], 0, FINISHED))
    await rig.front.end_of("right")
    assert rig.front.tokens["right"] == [10]


async def test_unreadable_message_of_the_api_server_is_skipped(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    skipped = UNREADABLE.labels("message of the API server")._value
    before = skipped.get()
    await rig.front._send(RequestType.ABORT, [1])
    await rig.front._send(RequestType.ADD, "no request")
    (mine,) = await start(rig, "r", worker)
    worker.send(outputs(mine, [10], 0, FINISHED))
    await rig.front.end_of("r0")
    assert skipped.get() >= before + 2


async def test_hung_worker_is_lost_after_a_timeout_and_aborts_when_it_resumes(rig: Rig) -> None:
    first, second = await rig.worker("a"), await rig.worker("b")
    await rig.front.ready()
    (mine,) = await start(rig, "r", first)
    first.send(outputs(mine, [10], 0))
    await rig.front.tokens_of("r0", 1)
    first.silent = True
    again = await second.submitted()
    assert (again.epoch, list(again.output_token_ids)) == (1, [10])
    assert rig.engine.workers.attached() == ["b"]
    # It resumes as if nothing had happened: its first message is a stale token.
    first.send(outputs(mine, [99], 1))
    first.silent = False
    assert list((await first.expect("abort")).abort.handles) == [mine.handle]
    await eventually(lambda: rig.count("rejected_outputs_total", cause="not_owner") == 1)
    second.send(outputs(again, [11], 1, FINISHED))
    await rig.front.end_of("r0")
    assert rig.front.tokens["r0"] == [10, 11]
    assert sorted(rig.engine.workers.attached()) == ["a", "b"]


async def test_stale_outputs_are_removed_from_a_step_and_the_others_delivered(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    await rig.front.add("x")
    aborted = await worker.submitted()
    await rig.front.add("y")
    kept = await worker.submitted()
    await rig.front.abort("x")
    assert list((await worker.expect("abort")).abort.handles) == [aborted.handle]
    both = merge(
        outputs(aborted, [1], 0),
        outputs(kept, [2], 0, FINISHED),
        frames=encode_outputs(
            [output_of(outputs(aborted, [1], 0)), output_of(outputs(kept, [2], 0, FINISHED))]
        ),
    )
    worker.send(both)
    await rig.front.end_of("y")
    assert rig.front.tokens == {"y": [2]}
    # The abort is repeated, because the worker still sent outputs of the request.
    assert list((await worker.expect("abort")).abort.handles) == [aborted.handle]
    assert rig.count("rejected_outputs_total", cause="unknown") == 1


def output_of(message: worker_pb2.AttachDown) -> EngineCoreOutput:
    """Return the only output in a scripted message."""
    return read_outputs(list(message.outputs.frames)).outputs[0]


async def test_failed_request_is_retried_elsewhere_and_then_ends_with_an_error(rig: Rig) -> None:
    first, second = await rig.worker("a"), await rig.worker("b")
    await rig.front.ready()
    await rig.front.add("r")
    submit = await first.submitted()
    for worker, other, epoch in ((first, second, 0), (second, first, 1), (first, second, 2)):
        assert submit.epoch == epoch
        worker.send(outputs(submit, [], 0, FAILED))
        submit = await other.submitted()
    second.send(outputs(submit, [], 0, FAILED))
    assert (await rig.front.end_of("r")).finish_reason == FinishReason.ERROR
    assert rig.count("recoveries_total", cause="failed") == 4
    assert len(rig.engine.table) == 0


async def test_failed_request_is_retried_on_the_only_instance(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    await rig.front.add("r")
    worker.send(outputs(await worker.submitted(), [], 0, FAILED))
    again = await worker.submitted()
    assert again.epoch == 1
    worker.send(outputs(again, [7], 0, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [7]


async def test_gap_in_the_tokens_is_never_delivered(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    await rig.front.add("r")
    submit = await worker.submitted()
    worker.send(outputs(submit, [1], 0))
    worker.send(outputs(submit, [3], 2))
    again = await worker.submitted()
    assert (again.epoch, list(again.output_token_ids)) == (1, [1])
    worker.send(outputs(again, [2], 1, FINISHED))
    await rig.front.end_of("r")
    assert rig.front.tokens["r"] == [1, 2]


@place_wait_ends
async def test_no_instance_is_an_error_and_closes_admission(rig: Rig) -> None:
    assert rig.admission.read() is AdmissionState.WAITING
    worker = await rig.worker("a")
    assert rig.admission.read() is AdmissionState.OPEN
    await rig.front.ready()
    await rig.crash(worker)
    del rig.members.instances["a"]
    rig.members.changed()
    await rig.front.add("r")
    end = await rig.front.end_of("r")
    assert (end.finish_reason, Refusal.decode(end.stop_reason)) == (FinishReason.ERROR, NO_INSTANCE)
    assert rig.admission.read() is AdmissionState.NO_INSTANCE
    other = await rig.worker("b")
    assert rig.admission.read() is AdmissionState.OPEN
    await rig.front.add("s")
    assert (await other.submitted()).request_id == "s"


@place_wait_ends
async def test_begun_request_waits_longer_for_an_instance_than_a_new_one(rig: Rig) -> None:
    """As when the front end itself is disconnected from all instances for a while."""
    worker = await rig.worker("a")
    await rig.front.ready()
    await rig.front.add("without a token")
    await worker.submitted()
    await rig.front.add("begun")
    worker.send(outputs(await worker.submitted(), [1], 0, PREFILL_DONE))
    await rig.front.tokens_of("begun", 1)
    await rig.crash(worker)
    del rig.members.instances["a"]
    rig.members.changed()
    # All wait for an instance; only the new request is given up.
    await rig.front.add("new")
    end = await rig.front.end_of("new")
    assert Refusal.decode(end.stop_reason) == NO_INSTANCE
    other = await rig.worker("b")
    submitted = {each.request_id: each for each in [await other.submitted(), await other.submitted()]}
    again = submitted["begun"]
    assert list(again.output_token_ids) == [1] and "without a token" in submitted
    other.send(outputs(again, [2], 1, FINISHED))
    await rig.front.end_of("begun")
    assert rig.front.tokens["begun"] == [1, 2]


async def test_request_waits_for_an_instance_until_its_deadline(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    rig.members.draining = frozenset({"a"})
    rig.members.changed()
    await rig.front.add("r")
    # The reply proves that the add was read: both use one socket.
    await rig.front.call("is_sleeping")
    assert len(rig.engine.table) == 1
    rig.members.draining = frozenset()
    rig.members.changed()
    assert (await worker.submitted()).request_id == "r"


async def test_utility_calls_go_to_all_instances_and_are_answered_once(rig: Rig) -> None:
    await rig.worker("a")
    await rig.worker("b")
    await rig.front.ready()
    first = await rig.front.call("get_supported_tasks")
    again = await rig.front.call("get_supported_tasks")
    assert b"generate" in first and b"generate" in again


async def test_restarted_worker_is_a_new_incarnation(rig: Rig) -> None:
    worker = await rig.worker("a")
    await rig.front.ready()
    await rig.front.add("r")
    worker.send(outputs(await worker.submitted(), [1], 0))
    await rig.front.tokens_of("r", 1)
    await rig.crash(worker)
    restarted = await rig.worker("a")
    again = await restarted.submitted()
    assert (again.epoch, list(again.output_token_ids)) == (1, [1])
