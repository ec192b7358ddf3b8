"""Policies with mistakes on a live cluster with two schedulers: requests are placed, both schedulers live,
and another policy can be set."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from examples.fleet import Chat
from tailrace.v1 import admin_pb2, scheduler_pb2, scheduler_pb2_grpc
from tests.harness.bad_policies import BAD_POLICIES, HANGING, HANGING_ORDER, ORDERED, REFUSED, install
from tests.harness.chats import Chats
from tests.harness.fleet import Fleet
from tests.harness.processes import wait_until
from tests.harness.tries import once_available
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow

WORKERS = ("w0", "w1")
PROMPT = "A prompt that a simulated engine answers at some length."
LONG = {"max_tokens": 1_000, "extra_body": {"min_tokens": 1_000}}
SCHEDULERS = ("scheduler-0", "scheduler-1")
REQUESTS = 20


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("bad")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", install(root / "package"))
        fleet = Fleet(root, "simulated")
        try:
            fleet.start_control(schedulers=2)
            for name in WORKERS:
                fleet.start_worker(name, ["--intra", "policy"])
            fleet.wait_instances(WORKERS)
            fleet.start_frontend()
            yield fleet
        finally:
            fleet.close()


@pytest.fixture(scope="module")
def chats(fleet: Fleet) -> Iterator[Chats]:
    chats = Chats(fleet.http)
    yield chats
    chats.close()


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    columns = (
        "requests placed | longest wait, s | schedulers alive | restarts | then | set policy works after, s"
    )
    lines = [f"policy | {columns}"]
    yield lines
    print("\n" + "\n".join(lines))


@pytest.mark.parametrize("name", BAD_POLICIES)
def test_a_policy_with_a_mistake(fleet: Fleet, table: list[str], name: str) -> None:
    pids = [fleet.processes[each].pid for each in SCHEDULERS]
    restarts = _restarts(fleet)
    if name in REFUSED:
        with pytest.raises(grpc.RpcError) as refused:
            request = admin_pb2.SetPolicyRequest(name=name)
            once_available(lambda: fleet.admin().SetPolicy(request, timeout=WAIT_S))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        then = "refused"
    else:
        _wait_set(fleet, name)
    waits_s = [_place(fleet, f"{name}-{number}") for number in range(REQUESTS)]
    if name not in REFUSED:
        wait_until(lambda: bool(_suspended(fleet, name)), f"{name} to be suspended")
        then = f"suspended: {_suspended(fleet, name)}"
        # Once more, and another policy is set before this one has been suspended.
        for each in SCHEDULERS:
            fleet.wait_healthy(each)
        _wait_set(fleet, name)
        for each in SCHEDULERS:
            _try_to_place(fleet, each, f"{name}-last", 0.5)
    began_s = time.monotonic()
    _wait_set(fleet, "least_loaded")
    works_s = time.monotonic() - began_s
    for each in SCHEDULERS:
        fleet.wait_healthy(each)
    wait_until(lambda: all(_active(fleet, each) == "least_loaded" for each in SCHEDULERS), "least_loaded")
    assert not any(_suspended(fleet, each) for each in (name, "least_loaded"))
    alive = [fleet.processes[each].alive for each in SCHEDULERS]
    restarts = _restarts(fleet) - restarts
    placed = f"{len(waits_s)} of {REQUESTS} | {max(waits_s):.2f}"
    table.append(f"{name} | {placed} | {sum(alive)} of 2 | {restarts} | {then} | {works_s:.2f}")
    assert all(alive) and [fleet.processes[each].pid for each in SCHEDULERS] == pids
    assert (restarts > 0) is (name in HANGING)


@pytest.mark.parametrize("name", ORDERED)
def test_a_batch_order_with_a_mistake_disturbs_no_stream(fleet: Fleet, chats: Chats, name: str) -> None:
    _wait_set(fleet, "least_loaded")
    reference = chats.run(PROMPT, max_tokens=200)
    pids = [fleet.processes[each].pid for each in WORKERS]
    running = [chats.start(PROMPT, max_tokens=200) for _ in range(8)]
    _wait_set(fleet, name)
    for each in WORKERS:
        fleet.processes[each].wait_for(f"batch order: '{name.removeprefix('ServesBy')}'")
    running += [chats.start(PROMPT, max_tokens=200) for _ in range(8)]
    assert all(reference.same_text_and_usage(each.result(timeout=WAIT_S)) for each in running)
    assert [fleet.processes[each].pid for each in WORKERS] == pids
    assert all(fleet.processes[each].alive for each in WORKERS)
    said = re.compile(rf"order {name.removeprefix('ServesBy')} at .*the engine's own serves")
    assert any(said.search(fleet.processes[each].text()) for each in WORKERS)
    _wait_set(fleet, "least_loaded")


def test_a_batch_order_that_hangs_costs_a_restart_of_the_workers(fleet: Fleet, chats: Chats) -> None:
    """The fleet serves again without anybody's help, and the streams that ran go on."""
    _wait_set(fleet, "least_loaded")
    reference = chats.run(PROMPT, **LONG)
    pids = [fleet.processes[each].pid for each in WORKERS]
    begun = threading.Barrier(9)
    running = [chats.start(PROMPT, _first_time(begun.wait), **LONG) for _ in range(8)]
    begun.wait(WAIT_S)
    _wait_set(fleet, HANGING_ORDER)
    for each in WORKERS:
        fleet.processes[each].wait_for("batch order: 'NeverReturnsFromRank'")
    # The first one that is ranked. It goes from one worker to the other, and both hang.
    last = chats.start(PROMPT, **LONG)
    for each in WORKERS:
        fleet.processes[each].wait_for("restarting without it")
    assert all(reference.same_text_and_usage(each.result(timeout=WAIT_S)) for each in running)
    assert [fleet.processes[each].pid for each in WORKERS] == pids
    # It was placed before, so that it waits for an instance as the others do.
    assert reference.same_text_and_usage(last.result(timeout=WAIT_S))
    # Or one that was on both would not be tried again.
    assert "died with" not in fleet.processes["frontend"].text()
    _wait_set(fleet, "least_loaded")


def test_set_policy_works_while_a_scheduler_hangs(fleet: Fleet, table: list[str]) -> None:
    """The leader stands still for good; the standby sets the policy."""
    leader = fleet.leader()
    standby = next(each for each in SCHEDULERS if each != leader)
    fleet.processes[leader].freeze()
    try:
        request = admin_pb2.SetPolicyRequest(name="round_robin")

        def set_policy() -> None:
            try:
                fleet.admin(standby).SetPolicy(request, timeout=WAIT_S)
            except grpc.RpcError as refused:
                # It may find no leader for a moment, but waits for none that hangs.
                assert leader not in str(refused)
                raise

        once_available(set_policy)
        assert _active(fleet, standby, WAIT_S) == "round_robin"
    finally:
        fleet.processes[leader].thaw()
    wait_until(lambda: _active(fleet, leader) == "round_robin", "the leader to follow")


@pytest.mark.parametrize("name", ["NeverReturnsFromPlace", "NeverReturnsFromTick"])
def test_a_policy_that_hangs_concerns_no_other_cluster(fleet: Fleet, table: list[str], name: str) -> None:
    """As of a model with a policy of its own."""
    other = f"default.{name.lower()}"
    scheduler = fleet.start_model_cluster(other)
    wait_until(lambda: _try_to_place(fleet, scheduler, "first", WAIT_S), "the other cluster to place")
    _wait_set(fleet, name)
    waits_s: list[float] = []
    # While both schedulers of this cluster hang, are ended by their watchdogs and suspend the policy.
    while not _suspended(fleet, name):
        number = len(waits_s)
        _try_to_place(fleet, SCHEDULERS[number % 2], f"{name}-here-{number}", 0.2)
        began_s = time.monotonic()
        assert _try_to_place(fleet, scheduler, f"{name}-there-{number}", WAIT_S)
        waits_s.append(time.monotonic() - began_s)
    _wait_set(fleet, "least_loaded")
    for each in SCHEDULERS:
        fleet.wait_healthy(each)
    table.append(f"{name} | other cluster: all of {len(waits_s)} | {max(waits_s):.2f} | | | |")
    # All but the last were placed before the end of it was seen.
    assert len(waits_s) > 1
    assert fleet.processes[scheduler].text().count("restarting without it") == 0


def _first_time(call: Callable[[float], object]) -> Callable[[Chat], None]:
    calls = iter([call])

    def on_progress(_: Chat) -> None:
        for each in calls:
            each(WAIT_S)

    return on_progress


def _restarts(fleet: Fleet) -> int:
    return sum(fleet.processes[each].text().count("restarting without it") for each in SCHEDULERS)


def _place(fleet: Fleet, request_id: str) -> float:
    """Place as a front end does, at either scheduler, until one answers; return how long that took."""
    began_s = time.monotonic()
    wait_until(lambda: any(_try_to_place(fleet, each, request_id, 2.0) for each in SCHEDULERS), request_id)
    return time.monotonic() - began_s


def _try_to_place(fleet: Fleet, scheduler: str, request_id: str, timeout_s: float) -> bool:
    request = scheduler_pb2.PlaceRequest(request_id=request_id, prompt_tokens=100, max_tokens=10)
    with grpc.insecure_channel(fleet.addresses[scheduler]) as channel:
        try:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            message = scheduler_pb2.PlaceManyRequest(requests=[request])
            (reply,) = next(stub.Place(iter([message]), timeout=timeout_s)).replies
            return bool(reply.instance_id)
        except grpc.RpcError:
            return False


def _policies(fleet: Fleet, scheduler: str, timeout_s: float = 5.0) -> list[admin_pb2.PolicyInfo]:
    try:
        reply = fleet.admin(scheduler).ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=timeout_s)
    except grpc.RpcError:
        return []
    return list(reply.policies)


def _active(fleet: Fleet, scheduler: str, timeout_s: float = 5.0) -> str:
    return next((each.name for each in _policies(fleet, scheduler, timeout_s) if each.active), "")


def _suspended(fleet: Fleet, name: str) -> str:
    """Return why the policy is suspended, as soon as both schedulers say so."""
    reasons = [info.suspended for each in SCHEDULERS for info in _policies(fleet, each) if info.name == name]
    return reasons[0] if len(reasons) == 2 and all(reasons) else ""


def _wait_set(fleet: Fleet, name: str) -> None:
    """Set a policy by whichever scheduler is in time for it; one may hang."""
    wait_until(lambda: _set(fleet, name), f"{name} to be set")


def _set(fleet: Fleet, name: str) -> bool:
    for each in SCHEDULERS:
        try:
            fleet.admin(each).SetPolicy(admin_pb2.SetPolicyRequest(name=name), timeout=2)
        except grpc.RpcError:
            continue
        return True
    return False
