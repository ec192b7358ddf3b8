"""What changes of a running cluster when it is to be as another plan says."""

from __future__ import annotations

import dataclasses
import os

import msgspec
import pytest

from tailrace.cli.apply import dangers, require_possible
from tailrace.cli.errors import UsageProblem
from tailrace.local.change import compare, differing, scaling_changes, within
from tailrace.local.options import Bounds, ClusterOptions, Engine, Front, OwnCluster
from tailrace.local.plan import DEVICES, PartSpec, Plan, Tier, make_plan
from tailrace.local.state import Identity, Part, identify
from tailrace.service.vllm_line import VllmLine

OPTIONS = ClusterOptions(
    workers=2, engine=Engine.SIMULATED, front=Front.RUST, model="/m", line=VllmLine.read(["--dtype", "auto"])
)


def parts(first_port: int, **changes: object) -> list[PartSpec]:
    """Return the parts of a plan on ports from this one on."""
    plan = make_plan(
        dataclasses.replace(OPTIONS, **changes),  # type: ignore[arg-type]
        lambda count: range(first_port, first_port + count),
        lambda port: ["etcd", f"--port={port}"],
        ["tailrace"],
        "/data",
    )
    return [*plan.parts]


ENDED = Identity(1, 1, "")


def running(specs: list[PartSpec], identity: Identity | None = None) -> list[Part]:
    """Return the parts as this process runs them, or as the given one did."""
    identity = identity or identify(os.getpid())
    return [Part(identity=identity, log="", spec=spec) for spec in specs]


RUNNING = running(parts(20_000))
ETCD = "127.0.0.1:20000"


def test_other_ports_are_no_change() -> None:
    assert not compare(RUNNING, parts(25_000), ETCD)


def test_another_number_of_threads_is_no_change() -> None:
    vllm = running(parts(20_000, engine=Engine.VLLM, cores=16))
    changes = compare(vllm, parts(25_000, engine=Engine.VLLM, cores=16, workers=3), ETCD)
    assert ([spec.name for spec in changes.added], changes.changed) == (["worker-2"], [])


def test_a_changed_part_keeps_its_addresses() -> None:
    changes = compare(RUNNING, parts(25_000, worker_arguments=("--kv-blocks", "99")), ETCD)
    assert not changes.added and not changes.removed
    old = {part.name: part.spec for part in RUNNING}
    assert [spec.name for spec in changes.changed] == ["worker-0", "worker-1"]
    for spec in changes.changed:
        before = old[spec.name]
        assert before is not None
        assert spec.address == before.address
        assert differing(before.command, spec.command) == "+--kv-blocks +99"


def test_an_edge_does_not_take_the_address_of_front_ends_while_they_serve() -> None:
    behind = parts(25_000, front=Front.BOTH, edge="127.0.0.1:8000")
    with pytest.raises(UsageProblem, match=r"edge: http://127.0.0.1:8000 is frontend's"):
        require_possible(compare(RUNNING, behind, ETCD), RUNNING)
    with pytest.raises(UsageProblem, match=r"frontend: http://127.0.0.1:8000 is edge's"):
        require_possible(compare(running(behind), parts(30_000), ETCD), running(behind))
    elsewhere = parts(25_000, front=Front.BOTH, edge="127.0.0.1:8100")
    require_possible(compare(RUNNING, elsewhere, ETCD), RUNNING)


def test_a_console_goes_on_whatever_the_file_says() -> None:
    with_console = running(parts(20_000, console=True))
    assert not compare(with_console, parts(25_000), ETCD)
    assert compare(with_console, parts(25_000, workers=1), ETCD).removed == ["worker-1"]


def test_a_new_part_finds_the_running_etcd() -> None:
    (added,) = compare(RUNNING, parts(25_000, workers=3), ETCD).added
    assert added.command[added.command.index("--etcd") + 1] == ETCD
    assert added.tier is Tier.WORKER


@pytest.mark.parametrize(
    ("workers", "changes", "problem"),
    [
        (2, {"model": "/other"}, "a stream does not go on with another model"),
        (2, {"engine": Engine.VLLM}, "a stream does not go on with another model"),
        (2, {"worker_arguments": ("--kv-blocks", "99")}, ""),
        (1, {"worker_arguments": ("--kv-blocks", "99")}, "it is the only worker"),
        (1, {"worker_arguments": ("--kv-blocks", "99"), "workers": 2}, ""),
    ],
)
def test_what_would_end_streams(workers: int, changes: dict[str, object], problem: str) -> None:
    before = running(parts(20_000, workers=workers))
    compared = compare(before, parts(25_000, **{"workers": workers, **changes}), ETCD)
    found = [*dangers(compared, before)]
    assert bool(found) == bool(problem)
    assert all(problem in each for each in found)


def test_the_only_worker_that_has_ended_may_restart() -> None:
    before = running(parts(20_000, workers=1), ENDED)
    compared = compare(before, parts(25_000, workers=1, worker_arguments=("--kv-blocks", "99")), ETCD)
    assert [spec.name for spec in compared.changed] == ["worker-0"]
    assert not [*dangers(compared, before)]


@pytest.mark.parametrize("changes", [{"cluster": "other"}, {"workers": 9}])
def test_what_cannot_be_changed_part_by_part(changes: dict[str, object]) -> None:
    compared = compare(RUNNING, parts(25_000, **changes), ETCD)
    with pytest.raises(UsageProblem, match="cannot be changed while the cluster runs"):
        require_possible(compared, RUNNING)


OWN = OwnCluster("default.b", "pascal", {}, {})
SECOND = dataclasses.replace(OPTIONS, workers=1, prefix="b-", own=OWN)
TWO = {"prefix": "a-", "edge": "127.0.0.1:8000", "traces": "monitor"}


def test_a_model_comes_and_goes_with_its_control_services() -> None:
    alone, both = running(parts(20_000, **TWO)), running(parts(20_000, **TWO, others=(SECOND,)))
    changes = compare(alone, parts(25_000, **TWO, others=(SECOND,)), ETCD)
    names = ["b-monitor", "b-migration", "b-scheduler", "b-worker-0", "b-frontend"]
    assert ([spec.name for spec in changes.added], changes.changed) == (names, [])
    # The edge goes on: it finds the new cluster by its name.
    assert compare(both, parts(25_000, **TWO), ETCD).removed == names
    assert not [*dangers(compare(both, parts(25_000, **TWO), ETCD), both)]
    # Spans go on to the monitor where it runs, also those of a new worker.
    assert not compare(both, parts(25_000, **TWO, others=(SECOND,)), ETCD)
    grown = dataclasses.replace(SECOND, workers=2)
    (worker,) = compare(both, parts(25_000, **TWO, others=(grown,)), ETCD).added
    monitor = next(part.spec for part in both if part.name == "b-monitor")
    assert monitor is not None
    assert worker.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://{monitor.address}"


def test_the_same_model_in_another_cluster_takes_no_requests_over() -> None:
    both = running(parts(20_000, **{**TWO, "workers": 2}, others=(SECOND,)))
    changed = dataclasses.replace(SECOND, worker_arguments=("--kv-blocks", "99"))
    changes = compare(both, parts(25_000, **{**TWO, "workers": 2}, others=(changed,)), ETCD)
    (danger,) = dangers(changes, both)
    assert danger.startswith("b-worker-0: it is the only worker")


def test_a_model_that_runs_does_not_change_its_cluster() -> None:
    both = running(parts(20_000, **TWO, others=(SECOND,)))
    moved = dataclasses.replace(SECOND, own=None)
    with pytest.raises(UsageProblem, match="b-worker-0: a model with a policy or slo of its own"):
        require_possible(compare(both, parts(25_000, **TWO, others=(moved,)), ETCD), both)


SCALED = {"engine": Engine.VLLM, "gpus": ("0", "1"), "workers": 1, "bounds": Bounds(0, 3, 60.0)}


def scaled_plan(**changes: object) -> Plan:
    """Return a plan with one scaled model."""
    options = dataclasses.replace(OPTIONS, **{**SCALED, **changes})  # type: ignore[arg-type]
    return make_plan(
        options,
        lambda count: range(30_000, 30_000 + count),
        lambda port: ["etcd", f"--port={port}"],
        ["tailrace"],
        "/data",
    )


def kept(running_names: list[str], known: bool = True, **changes: object) -> list[str]:
    """Return the workers that a file wants while these run; one with a star is leaving."""
    plan = scaled_plan(**changes)
    specs = {spec.name: spec for spec in plan.scaled[0].workers}
    specs |= {f"worker-{n}": dataclasses.replace(specs["worker-0"], name=f"worker-{n}") for n in range(4)}
    found = [
        msgspec.structs.replace(running([specs[name.rstrip("*")]])[0], leaving=name.endswith("*"))
        for name in running_names
    ]
    parts = within(plan, found, {"/m"} if known else set())
    assert [spec.name for spec in parts if not spec.scaled] == [
        spec.name for spec in plan.parts if not spec.scaled
    ]
    return [spec.name for spec in parts if spec.scaled]


def test_a_file_leaves_the_number_of_scaled_workers_within_bounds() -> None:
    assert kept([]) == []
    assert kept(["worker-2", "worker-1"]) == ["worker-1", "worker-2"]
    assert kept(["worker-0", "worker-1", "worker-2"], bounds=Bounds(0, 2, 60.0)) == ["worker-0", "worker-1"]
    assert kept(["worker-1"], bounds=Bounds(2, 3, 60.0), workers=2) == ["worker-1", "worker-0"]
    # What leaves has its name until it has gone.
    assert kept(["worker-0*"], bounds=Bounds(1, 3, 60.0)) == ["worker-1"]
    # A model that is new starts as the file says, one whose number was fixed goes on.
    assert kept([], known=False) == ["worker-0"]
    assert kept(["worker-0", "worker-1"], known=False) == ["worker-0", "worker-1"]


def test_a_scaled_worker_keeps_the_gpus_that_it_got() -> None:
    plan = scaled_plan()
    (worker,) = plan.tier(Tier.WORKER)
    other = dataclasses.replace(worker, environment={**worker.environment, DEVICES: "1"})
    before = running([other if spec is worker else spec for spec in plan.parts])
    assert worker.environment[DEVICES] == "0"
    assert not compare(before, plan.parts, ETCD)
    (changed,) = compare(before, scaled_plan(worker_arguments=("--x",)).parts, ETCD).changed
    assert changed.environment[DEVICES] == "1"
    # The shares of memory do not depend on how many run.
    assert scaled_plan(gpus=("0",)).scaled[0].workers[2].option("--gpu-memory-utilization") == "0.900"


def test_other_bounds_and_other_workers_to_come_are_changes() -> None:
    old = scaled_plan().scaled
    assert not [*scaling_changes(old, scaled_plan().scaled)]
    assert [*scaling_changes(old, scaled_plan(bounds=Bounds(1, 3, 60.0)).scaled)] == [
        ("/m", "autoscale 0 to 3 -> 1 to 3")
    ]
    assert [*scaling_changes((), old)] == [("/m", "autoscale - -> 0 to 3")]
    assert [*scaling_changes(old, ())] == [("/m", "autoscale 0 to 3 -> -")]
    assert [*scaling_changes(old, scaled_plan(worker_arguments=("--x",)).scaled)] == [
        ("/m", "autoscale: workers that start later are other ones")
    ]
