"""Engine-core methods called by the API server: one reply each, whatever the instances do."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from frontend_svc.utilities import UtilityCalls
from tailrace.v1 import worker_pb2
from tailrace.wire.requests import UtilityCall, utility_failure, utility_result

NO_ARGS = msgspec.Raw(b"\x90")


class RecordingOutbox:
    """Outbox that records its messages."""

    def __init__(self, *instance_ids: str) -> None:
        self.instance_ids = list(instance_ids)
        self.sent: list[tuple[str, int]] = []

    def attached(self) -> list[str]:
        return self.instance_ids

    def max_message_bytes(self, instance_id: str) -> int:
        return 1 << 20

    def send(self, instance_id: str, message: worker_pb2.AttachUp) -> bool:
        self.sent.append((instance_id, message.utility.call_id))
        return instance_id in self.instance_ids


def answer(call_id: int, frames: Sequence[bytes]) -> worker_pb2.UtilityResult:
    return worker_pb2.UtilityResult(call_id=call_id, frames=frames)


@pytest.fixture
def answers() -> list[Sequence[bytes]]:
    return []


async def test_first_success_wins_and_later_replies_are_dropped(answers: list[Sequence[bytes]]) -> None:
    instances = RecordingOutbox("a", "b", "c")
    utilities = UtilityCalls(instances, answers.append)
    utilities.call(UtilityCall(0, 2**63 + 5, "list_loras", NO_ARGS), [b""])
    call_id = 2**63 + 5
    assert instances.sent == [("a", call_id), ("b", call_id), ("c", call_id)]
    good = utility_result(call_id, [1])
    utilities.result("a", answer(call_id, utility_failure(call_id, "no")))
    utilities.result("b", answer(call_id, good))
    utilities.result("c", answer(call_id, utility_result(call_id, [2])))
    assert answers == [good]


async def test_failure_is_returned_when_all_instances_fail(answers: list[Sequence[bytes]]) -> None:
    utilities = UtilityCalls(RecordingOutbox("a", "b"), answers.append)
    utilities.call(UtilityCall(0, 7, "add_lora", NO_ARGS), [b""])
    failure = utility_failure(7, "not allowed")
    utilities.result("a", answer(7, failure))
    assert answers == []
    utilities.instance_lost("b")
    assert answers == [failure]


async def test_reply_to_another_call_never_reaches_the_api_server(answers: list[Sequence[bytes]]) -> None:
    utilities = UtilityCalls(RecordingOutbox("a"), answers.append)
    utilities.call(UtilityCall(0, 7, "list_loras", NO_ARGS), [b""])
    utilities.result("a", answer(7, utility_result(8, True)))
    utilities.result("a", answer(7, [b"junk"]))
    assert answers == []
    utilities.close()


async def test_utility_call_waits_for_the_first_instance(answers: list[Sequence[bytes]]) -> None:
    instances = RecordingOutbox()
    utilities = UtilityCalls(instances, answers.append)
    utilities.call(UtilityCall(0, 7, "get_supported_tasks", NO_ARGS), [b""])
    instances.instance_ids.append("a")
    utilities.instance_attached("a")
    utilities.result("a", answer(7, utility_result(7, ["generate"])))
    assert len(answers) == 1
    # Answered from the cache, with its own call ID.
    utilities.call(UtilityCall(0, 9, "get_supported_tasks", NO_ARGS), [b""])
    outputs = msgspec.msgpack.decode(answers[1][0])
    assert outputs[4] == [9, None, [None, ["generate"]]]
    assert instances.sent == [("a", 7)]


@pytest.mark.parametrize(
    "method", ["sleep", "wake_up", "pause_scheduler", "collective_rpc", "no_such_method"]
)
async def test_methods_that_control_a_single_engine_reach_no_instance(
    method: str, answers: list[Sequence[bytes]]
) -> None:
    instances = RecordingOutbox("a")
    utilities = UtilityCalls(instances, answers.append)
    utilities.call(UtilityCall(0, 7, method, NO_ARGS), [b""])
    assert instances.sent == []
    [[frame]] = answers
    assert f"{method} controls a single engine and is not available on a fleet".encode() in frame


async def test_utility_calls_beyond_the_limit_fail_at_once(answers: list[Sequence[bytes]]) -> None:
    utilities = UtilityCalls(RecordingOutbox("a"), answers.append)
    for call_id in range(1, 258):
        utilities.call(UtilityCall(0, call_id, "reset_prefix_cache", NO_ARGS), [b""])
    assert len(answers) == 1 and b"pending already" in answers[0][0]
    utilities.close()


async def test_utility_call_too_large_for_every_instance_fails_at_once(
    answers: list[Sequence[bytes]],
) -> None:
    instances = RecordingOutbox("a")
    utilities = UtilityCalls(instances, answers.append)
    utilities.call(UtilityCall(0, 7, "add_lora", NO_ARGS), [b"x" * (2 << 20)])
    assert len(answers) == 1 and b"takes 1048576 at most" in answers[0][0]
    assert instances.sent == []
