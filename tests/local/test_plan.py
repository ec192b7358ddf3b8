"""The plan of a local cluster: processes and their arguments."""

from __future__ import annotations

import dataclasses

from tailrace.local.options import Bounds, ClusterOptions, Engine, Front, OwnCluster
from tailrace.local.plan import PartSpec, Plan, Tier, make_plan, waits_for_worker
from tailrace.service.vllm_line import VllmLine

OPTIONS = ClusterOptions(
    workers=3,
    engine=Engine.VLLM,
    front=Front.PYTHON,
    host="127.0.0.1",
    port=8000,
    schedulers=1,
    frontends=1,
    model="/models/tiny",
    line=VllmLine.read(["--served-model-name", "tiny"]),
    policy_parameters={},
    cores=8,
    gpus=(),
    traces="monitor",
)


def _plan(**changes: object) -> Plan:
    return make_plan(
        dataclasses.replace(OPTIONS, **changes),  # type: ignore[arg-type]
        lambda count: range(7000, 7000 + count),
        lambda port: ["etcd", f"--port={port}"],
        ["tailrace"],
        "/run/data",
    )


def _option(part: PartSpec, name: str) -> str:
    return part.command[list(part.command).index(name) + 1]


def test_every_part_has_its_own_addresses() -> None:
    plan = _plan(schedulers=2, frontends=2)
    services = [part for part in plan.parts if part.tier is not Tier.ETCD]
    addresses = [_option(part, flag) for part in services for flag in ("--listen", "--metrics")]
    assert len(set(addresses) | {plan.etcd}) == len(addresses) + 1
    assert all(_option(part, "--etcd") == plan.etcd for part in services)
    assert all(_option(part, "--id") == part.name for part in services)
    assert len({part.name for part in plan.parts}) == len(plan.parts)


def test_a_front_end_may_listen_on_an_ipv6_address() -> None:
    plan = _plan(host="::1", port=8000)
    (frontend,) = plan.tier(Tier.FRONTEND)
    assert _option(frontend, "--http") == "[::1]:8000" and plan.http == frontend.http == "http://[::1]:8000"


def test_a_console_acts_with_the_operators_certificate_and_asks_for_a_token() -> None:
    assert not _plan().tier(Tier.CONSOLE)
    (plain,) = _plan(console=True, schedulers=2).tier(Tier.CONSOLE)
    assert _option(plain, "--http") == plain.address
    assert _option(plain, "--admin") == _plan(console=True, schedulers=2).admin
    assert not plain.option("--tls") and not plain.option("--token-file")
    (secured,) = _plan(console=True, tls=True).tier(Tier.CONSOLE)
    assert _option(secured, "--tls").endswith("/admin/local")
    assert _option(secured, "--token-file") == "/run/data/console.token"
    assert not secured.role


def test_two_schedulers_form_one_admin_address() -> None:
    plan = _plan(schedulers=2)
    schedulers = [part for part in plan.parts if part.name.startswith("scheduler-")]
    assert plan.admin == ",".join(part.address for part in schedulers)


def test_the_line_reaches_each_worker_and_front_end() -> None:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
    plan = _plan(frontends=2, front=Front.RUST, line=VllmLine.read(flags))
    for part in (*plan.tier(Tier.FRONTEND), *plan.tier(Tier.WORKER)):
        assert tuple(part.command[-2:]) == flags


def test_all_front_ends_keep_answers_if_one_does() -> None:
    plan = _plan(frontends=2, frontend_arguments=("--keep-answers", "90"))
    assert [_option(part, "--keep-answers") for part in plan.tier(Tier.FRONTEND)] == ["90", "90"]
    assert not any("--keep-answers" in part.command for part in plan.tier(Tier.WORKER))


def test_front_ends_share_the_port() -> None:
    fronts = _plan(frontends=2, front=Front.RUST).tier(Tier.FRONTEND)
    assert [_option(part, "--http") for part in fronts] == ["127.0.0.1:8000"] * 2
    assert {_option(part, "--front") for part in fronts} == {"rust"}
    assert {_option(part, "--served-model-name") for part in fronts} == {"tiny"}


def test_both_api_servers_are_behind_an_edge_and_one_starts_on_demand() -> None:
    plan = _plan(frontends=2, front=Front.BOTH, edge="127.0.0.1:8000")
    fronts = {part.name: part for part in plan.tier(Tier.FRONTEND)}
    assert {name: part.option("--front") for name, part in fronts.items()} == {
        "frontend-0": "rust",
        "frontend-1": "rust",
        "frontend-python": "python",
    }
    assert [name for name, part in fronts.items() if "--on-demand" in part.command] == ["frontend-python"]
    # vLLM is loaded when it is needed.
    assert not any(part.heavy for part in fronts.values())
    (edge,) = plan.tier(Tier.EDGE)
    ports = {part.http for part in (edge, *fronts.values())}
    assert len(ports) == 4 and plan.http == edge.http == "http://127.0.0.1:8000"


def test_users_speak_https_to_an_api_server_with_a_certificate() -> None:
    plan = _plan(line=VllmLine.read(["--ssl-keyfile", "key.pem", "--ssl-certfile", "cert.pem"]))
    assert plan.http == "https://127.0.0.1:8000"
    assert {part.http for part in plan.tier(Tier.FRONTEND)} == {plan.http}
    assert _plan().http == "http://127.0.0.1:8000"


def test_engines_share_the_cores() -> None:
    workers = _plan(workers=3, cores=8).tier(Tier.WORKER)
    assert [part.environment["OMP_NUM_THREADS"] for part in workers] == ["2", "2", "2"]
    assert _plan(workers=3, cores=2).tier(Tier.WORKER)[0].environment["OMP_NUM_THREADS"] == "1"


def test_engines_share_the_gpus() -> None:
    workers = _plan(workers=3, gpus=("0", "GPU-5")).tier(Tier.WORKER)
    assert [part.environment["CUDA_VISIBLE_DEVICES"] for part in workers] == ["0", "GPU-5", "0"]
    assert {_option(part, "--gpu-memory-utilization") for part in workers} == {"0.450"}


def test_workers_with_several_ranks_get_adjacent_gpus() -> None:
    changes = {"gpus": ("0", "1", "2", "3", "4"), "workers": 3, "cores": 13}
    workers = _plan(**changes, ranks=2, line=VllmLine.read(["-tp", "2"])).tier(Tier.WORKER)
    assert [part.environment["CUDA_VISIBLE_DEVICES"] for part in workers] == ["0,1", "2,3", "0,1"]
    assert {part.environment["OMP_NUM_THREADS"] for part in workers} == {"2"}
    assert {_option(part, "-tp") for part in workers} == {"2"}
    assert {_option(part, "--gpu-memory-utilization") for part in workers} == {"0.450"}
    # The worker itself reports that there are too few.
    short = _plan(ranks=2, gpus=("7",), workers=1).tier(Tier.WORKER)[0]
    assert short.environment["CUDA_VISIBLE_DEVICES"] == "7"


def test_worker_arguments_go_to_every_worker() -> None:
    for engine in Engine:
        workers = _plan(engine=engine, worker_arguments=("--max-requests", "8")).tier(Tier.WORKER)
        assert all(
            list(part.command[-4:]) == ["--max-requests", "8", *OPTIONS.line.arguments] for part in workers
        )


def test_workers_may_take_long_to_profile() -> None:
    for engine in Engine:
        workers = _plan(engine=engine, worker_arguments=("--profile-at-start",)).tier(Tier.WORKER)
        # They wait for the worker that is being profiled.
        assert all(part.timeout_s > 60 for part in workers)


def test_spans_go_to_the_monitor_another_endpoint_or_nowhere() -> None:
    plan = _plan()
    monitor = next(part for part in plan.parts if part.name == "monitor")
    assert plan.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://{monitor.address}"
    named = _plan(traces="http://collector:4317").environment
    assert named["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4317"
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in _plan(traces=None).environment


def test_many_simulated_workers_share_processes() -> None:
    groups = _plan(engine=Engine.SIMULATED, workers=60).tier(Tier.WORKER)
    assert [len(part.members) for part in groups] == [25, 25, 10]
    assert [_option(part, "--count") for part in groups] == ["25", "25", "10"]
    assert [part.name for part in groups] == ["worker-0", "worker-25", "worker-50"]
    assert [member for part in groups for member in part.members] == [f"worker-{n}" for n in range(60)]


def test_few_simulated_workers_have_a_process_each() -> None:
    groups = _plan(engine=Engine.SIMULATED, workers=8).tier(Tier.WORKER)
    assert [list(part.members) for part in groups] == [[f"worker-{n}"] for n in range(8)]
    assert not any("--count" in part.command for part in groups)


def test_simulated_workers_are_light() -> None:
    assert not any(part.heavy for part in _plan(engine=Engine.SIMULATED).tier(Tier.WORKER))
    assert all(part.heavy for part in _plan().tier(Tier.WORKER))


def test_several_models_are_behind_an_edge() -> None:
    other = dataclasses.replace(
        OPTIONS, workers=1, front=Front.RUST, model="/models/other", prefix="other-", line=VllmLine.read([])
    )
    plan = _plan(
        prefix="tiny-",
        frontends=2,
        others=(other,),
        edge="127.0.0.1:8000",
        edge_arguments=("--api-keys", "k"),
    )
    fronts = {part.name: part for part in plan.tier(Tier.FRONTEND)}
    assert [*fronts] == ["tiny-frontend-0", "tiny-frontend-1", "other-frontend"]
    assert [part.name for part in plan.tier(Tier.WORKER)] == [
        *(f"tiny-worker-{number}" for number in range(3)),
        "other-worker-0",
    ]
    # Each has a port of its own; users know the edge's.
    assert len({part.http for part in fronts.values()}) == 3
    (edge,) = plan.tier(Tier.EDGE)
    assert (plan.http, edge.http, _option(edge, "--api-keys")) == (*["http://127.0.0.1:8000"] * 2, "k")
    assert _option(fronts["other-frontend"], "--model") == "/models/other"
    listening = [part.address for part in plan.parts] + [each.http for each in fronts.values()]
    assert len(set(listening)) == len(listening)


def test_models_share_the_gpus() -> None:
    changes = {"all_workers": 4, "gpus": ("0", "1", "2", "3")}
    other = dataclasses.replace(OPTIONS, workers=1, prefix="other-", earlier_workers=3, **changes)  # type: ignore[arg-type]
    workers = _plan(prefix="tiny-", others=(other,), edge="127.0.0.1:8000", **changes).tier(Tier.WORKER)
    assert [part.environment["CUDA_VISIBLE_DEVICES"] for part in workers] == ["0", "1", "2", "3"]


def test_a_model_with_a_policy_of_its_own_has_a_cluster_of_its_own() -> None:
    other = dataclasses.replace(
        OPTIONS,
        workers=1,
        model="/models/other",
        prefix="other-",
        own=OwnCluster("c.other", "pascal", {}, {}),
    )
    plan = _plan(
        cluster="c",
        prefix="tiny-",
        schedulers=2,
        others=(other,),
        edge="127.0.0.1:8000",
        tls=True,
        console=True,
    )
    clusters: dict[str, list[str]] = {}
    for part in plan.parts:
        clusters.setdefault(part.option("--cluster"), []).append(part.name)
    assert clusters["c.other"] == [
        "other-monitor",
        "other-migration",
        "other-scheduler-0",
        "other-scheduler-1",
        "other-worker-0",
        "other-frontend",
    ]
    # One edge for all; it finds the other cluster by its name.
    assert "edge" in clusters["c"] and "tiny-worker-0" in clusters["c"]
    parts = {part.name: part for part in plan.parts}
    schedulers = [parts[f"other-scheduler-{number}"].address for number in range(2)]
    assert plan.own == {"c.other": ",".join(schedulers)}
    assert plan.admin == ",".join(parts[f"scheduler-{number}"].address for number in range(2))
    assert parts["monitor"].address in plan.environment["OTEL_EXPORTER_OTLP_ENDPOINT"]
    spans = f"https://{parts['other-monitor'].address}"
    for name in clusters["c.other"]:
        assert parts[name].environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == spans
    assert not any("OTEL_EXPORTER_OTLP_ENDPOINT" in parts[name].environment for name in clusters["c"])
    listening = [part.address for part in plan.parts] + [part.option("--metrics") for part in plan.parts[1:]]
    assert len({*listening}) == len(listening)
    # Two journals.
    assert parts["migration"].option("--journal") != parts["other-migration"].option("--journal")


def test_a_scaled_model_has_a_plan_for_each_worker_that_it_may_have() -> None:
    second = dataclasses.replace(
        OPTIONS, model="/models/b", prefix="b-", workers=0, bounds=Bounds(0, 2, 600.0), gpus=("0", "1")
    )
    third = dataclasses.replace(second, model="/models/c", prefix="c-", bounds=Bounds(1, 1, 30.0), workers=1)
    plan = _plan(prefix="a-", others=(second, third), edge="127.0.0.1:8000", tls=True)
    names = [part.name for part in plan.tier(Tier.WORKER)]
    assert names == ["a-worker-0", "a-worker-1", "a-worker-2", "c-worker-0"]
    b, c = plan.scaled
    assert (b.model, b.least, b.most, b.schedulers) == ("/models/b", 0, 2, ["scheduler"])
    assert [spec.name for spec in b.workers] == ["b-worker-0", "b-worker-1"]
    assert [*b.devices] == ["0", "1"]
    # The scheduler has the shortest of the cool-downs, and what follows it the rest.
    (scheduler,) = (part for part in plan.parts if part.name == "scheduler")
    assert _option(scheduler, "--desired-min") == "0"
    assert _option(scheduler, "--desired-cooldown") == _option(scheduler, "--desired-window") == "30"
    assert (b.hold_s, c.hold_s) == (570.0, 0.0)
    (scaler,) = plan.tier(Tier.SCALER)
    assert _option(scaler, "--run-dir") == "/run" and plan.parts[-1] is scaler
    front_ends = {part.name: part for part in plan.tier(Tier.FRONTEND)}
    late = [name for name, part in front_ends.items() if waits_for_worker(part, plan.scaled, names)]
    assert late == ["b-frontend"]
    assert not waits_for_worker(front_ends["b-frontend"], plan.scaled, ["b-worker-1"])


def test_without_a_scaled_model_there_is_no_scaler() -> None:
    plan = _plan()
    assert not plan.scaled and not plan.tier(Tier.SCALER)
    assert not any("--desired-min" in part.command for part in plan.parts)
