"""A sample of `make fuzz`: invalid requests and messages to a whole cluster."""

from __future__ import annotations

import asyncio
from random import Random

import grpc
import pytest

from tailrace.security.access import CHANGES
from tailrace.service.message_stream import connect_stream
from tailrace.v1 import worker_pb2
from tailrace.v1.admin_pb2 import AdminProfileRequest
from tailrace.v1.profile_pb2 import ProfileRequest
from tailrace.v1.worker_pb2 import ImportRequest
from tailrace.v1.worker_pb2_grpc import WorkerStub
from tests.fuzz.calls import METHODS, Finding, fuzz_method, is_served
from tests.fuzz.streams import fuzz_stream, stream_addresses
from tests.harness.fleet import Fleet
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

INPUTS = 3
CONNECTIONS = 30


def _tracebacks(fleet: Fleet) -> dict[str, int]:
    return {name: process.text().count("Traceback (most") for name, process in fleet.processes.items()}


@pytest.mark.parametrize("part", ["monitor", "migration", "scheduler-0", "w0"])
def test_fuzzed_requests_cause_no_internal_error(simulated_fleet: Fleet, part: str) -> None:
    before = _tracebacks(simulated_fleet)
    findings: list[Finding] = []
    called = 0
    with grpc.insecure_channel(simulated_fleet.addresses[part]) as channel:
        # Methods that change the cluster are left out, as other tests share it.
        for method in METHODS:
            if method.path not in CHANGES and is_served(channel, method):
                tally = fuzz_method(channel, method, INPUTS, Random(f"{part} {method.path}"), (), call_s=0.5)
                findings += tally.findings
                called += tally.statuses.total()
    assert called >= INPUTS
    assert findings == []
    assert _tracebacks(simulated_fleet) == before
    assert all(process.alive for process in simulated_fleet.processes.values())


def test_fuzzed_messages_end_only_their_stream(simulated_fleet: Fleet) -> None:
    before = _tracebacks(simulated_fleet)
    address = asyncio.run(_stream_address(simulated_fleet, "w1"))
    assert fuzz_stream(address, CONNECTIONS, Random(5), list(simulated_fleet.addresses)) > CONNECTIONS
    assert _tracebacks(simulated_fleet) == before
    assert all(process.alive for process in simulated_fleet.processes.values())


@pytest.mark.parametrize("field", ["timeout_s", "room_wait_s"])
def test_import_rejects_invalid_seconds(simulated_fleet: Fleet, field: str) -> None:
    request = ImportRequest(migration_id="m", request_id="r", source_address="127.0.0.1:1", timeout_s=1.0)
    setattr(request, field, float("nan"))
    with grpc.insecure_channel(simulated_fleet.addresses["w0"]) as channel:
        with pytest.raises(grpc.RpcError) as error:
            next(iter(WorkerStub(channel).Import(request, timeout=WAIT_S)))
        assert isinstance(error.value, grpc.Call)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in (error.value.details() or "")


async def test_invalid_submission_fails_alone(simulated_fleet: Fleet) -> None:
    """Later submissions of the same stream are still answered."""
    address = await _stream_address(simulated_fleet, "w2")
    stream = await connect_stream(address, worker_pb2.AttachDown)
    try:
        hello = worker_pb2.FrontendHello(frontend_id="fuzz", incarnation="1", attempt=1)
        stream.send(worker_pb2.AttachUp(hello=hello))
        for handle, answering_s in ((1, float("nan")), (2, 0.0)):
            submit = worker_pb2.Submit(
                request_id=f"wrong-{handle}", handle=handle, epoch=1, answer_tokens=3, answering_s=answering_s
            )
            stream.send(worker_pb2.AttachUp(submit=submit))
        failed: list[int] = []
        async with asyncio.timeout(WAIT_S):
            while len(failed) < 2:
                message = await stream.read()
                assert message is not None, "the worker closed the stream"
                # What cannot be read fails; what no engine can run is rejected, with the reason.
                failed += message.outputs.handles
                if message.HasField("rejected"):
                    assert "no frames" in message.rejected.reason
                    failed.append(message.rejected.handle)
        assert failed == [1, 2]
    finally:
        stream.close()


async def _stream_address(fleet: Fleet, worker: str) -> str:
    (address,) = await stream_addresses(fleet.etcd, [worker])
    return address


@pytest.mark.parametrize("budget_s", [float("nan"), float("inf"), -1.0])
def test_profile_rejects_an_invalid_budget(simulated_fleet: Fleet, budget_s: float) -> None:
    with grpc.insecure_channel(simulated_fleet.addresses["w0"]) as channel:
        direct = WorkerStub(channel).Profile(ProfileRequest(budget_s=budget_s), timeout=WAIT_S)
        forwarded = simulated_fleet.admin().Profile(
            AdminProfileRequest(instance_id="w0", budget_s=budget_s), timeout=WAIT_S
        )
        for call in (direct, forwarded):
            with pytest.raises(grpc.RpcError) as error:
                next(iter(call))
            assert isinstance(error.value, grpc.Call)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "budget_s" in (error.value.details() or "")
