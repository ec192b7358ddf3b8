"""What each host runs, and the folders that are made for it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.fleet.file import FleetError
from tailrace.fleet.folders import compose, processes, prometheus, systemd
from tailrace.fleet.hosts import Installation, host_plan, ports, replicas
from tailrace.local.plan import PartSpec, Plan, Tier
from tests.deploy.services import assert_systemd_accepts, longest_s, parse_serve
from tests.fleet.files import BEHIND_EDGES, TWO_HOSTS, changed, read
from tests.waiting import WAIT_S

INSTALLED = Installation(["tailrace"], "etcd", "/data", "/tls", "/keys.json")


def plans(folder: Path, content: Any = TWO_HOSTS) -> dict[str, Plan]:
    file, options = read(folder, content)
    return {host: host_plan(file.fleet, options, host, INSTALLED) for host in file.fleet.hosts}


def option(part: PartSpec, name: str) -> str:
    return part.command[list(part.command).index(name) + 1]


def test_what_each_host_runs(tmp_path: Path) -> None:
    names = {host: [part.name for part in plan.parts] for host, plan in plans(tmp_path).items()}
    control = ["monitor", "migration", "scheduler"]
    assert names["a"] == [
        "etcd-a",
        *(f"{kind}-a" for kind in control),
        *(f"worker-a-{number}" for number in range(4)),
        "frontend-a-0",
    ]
    assert names["b"] == [*(f"{kind}-b" for kind in control), "worker-b-0", "worker-b-1"]


def test_a_host_is_found_by_the_others(tmp_path: Path) -> None:
    for host, plan in plans(tmp_path).items():
        for part in plan.parts:
            if part.tier is Tier.ETCD:
                continue
            assert option(part, "--etcd") == "10.0.0.1:2379"
            assert option(part, "--tls") == f"/tls/issued/{part.role}/{part.name}"
            listen = option(part, "--listen")
            if host == "a":
                assert listen == part.address
            else:
                # A name is for others: the host listens on all of its addresses.
                assert listen.startswith("0.0.0.0:")
                assert option(part, "--advertise") == "b.example"


def test_no_port_is_used_twice(tmp_path: Path) -> None:
    models: list[dict[str, Any]] = [
        {
            "model": f"/m{number}",
            "engine": "simulated",
            "replicas": {"a": workers},
            "frontends": {"a": fronts},
        }
        for number, (workers, fronts) in enumerate([(40, 8), (40, 8), (0, 4)])
    ]
    models[1]["policy"] = models[2]["policy"] = {}
    file, options = read(tmp_path, changed(BEHIND_EDGES, "models", models))
    plan = host_plan(file.fleet, options, "a", INSTALLED)
    assert len(plan.parts) == 80 + 20 + 5 + 2 * 3
    used: list[int] = []
    found = ports(file.fleet, plan, "a")
    assert found.users == ["8000"]
    for text in (*found.own, *found.behind, *found.users):
        low, _, high = text.partition("-")
        used += range(int(low), int(high or low) + 1)
    assert len(set(used)) == len(used)


def test_gpus_are_shared_out(tmp_path: Path) -> None:
    two = changed(TWO_HOSTS, "models.0.flags.tensor-parallel-size", 2)
    plan = plans(tmp_path, two)["a"]
    devices = [part.environment["CUDA_VISIBLE_DEVICES"] for part in plan.tier(Tier.WORKER)]
    assert devices == ["0,1", "2,3"]


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        (None, 1, {"a": 4, "b": 2}),
        (None, 2, {"a": 2, "b": 1}),
        (3, 1, {"a": 2, "b": 1}),
        ({"b": 1}, 1, {"a": 0, "b": 1}),
    ],
)
def test_instances_are_spread(tmp_path: Path, given: Any, ranks: int, expected: dict[str, int]) -> None:
    content = changed(TWO_HOSTS, "models.0.flags.tensor-parallel-size", ranks)
    content = changed(content, "models.0.replicas", given) if given else content
    file, options = read(tmp_path, content)
    assert replicas(file.fleet, options) == [expected]


def test_more_instances_than_a_host_has_ports_for(tmp_path: Path) -> None:
    # They share GPUs.
    shared = changed(TWO_HOSTS, "models.0.flags.gpu-memory-utilization", 0.04)
    file, options = read(tmp_path, changed(shared, "models.0.replicas", 120))
    assert replicas(file.fleet, options) == [{"a": 80, "b": 40}]
    file, options = read(tmp_path, changed(shared, "models.0.replicas", 123))
    with pytest.raises(FleetError, match=r"replicas: 82 of them would be on host a, which has ports for 80"):
        replicas(file.fleet, options)


@pytest.mark.parametrize(
    ("given", "flags", "message"),
    [
        (
            {"a": 5},
            {},
            "host a has 4 GPUs, and its instances take 5: at most 4, or with gpu-memory-utilization",
        ),
        ({"a": 3}, {"tensor-parallel-size": 2}, "host a has 4 GPUs, and its instances take 6: at most 2, or"),
        ({"b": 1}, {"pipeline-parallel-size": 4}, "host b has 2 GPUs, and its instances take 4: at most 0"),
        ({"b": 1}, {"pipeline-parallel-size": 4, "gpu-memory-utilization": 0.1}, "host b has 2 GPUs"),
        (7, {}, "host a has 4 GPUs, and its instances take 5"),
        ({"a": 5}, {"gpu-memory-utilization": 0.4}, ""),
    ],
)
def test_more_instances_than_gpus(tmp_path: Path, given: Any, flags: dict[str, Any], message: str) -> None:
    content = changed(changed(TWO_HOSTS, "models.0.flags", flags), "models.0.replicas", given)
    file, options = read(tmp_path, content)
    if message:
        with pytest.raises(FleetError) as caught:
            replicas(file.fleet, options)
        assert str(caught.value).startswith(f"models[0].replicas: {message}")
    else:
        assert replicas(file.fleet, options) == [{"a": 5, "b": 0}]
    # How many GPUs there are is not stated.
    for place, value in (("hosts.a.gpus", 0), ("hosts.b.gpus", 0)):
        content = changed(content, place, value)
    file, options = read(tmp_path, content)
    assert replicas(file.fleet, options)


def test_an_instance_that_is_too_large(tmp_path: Path) -> None:
    file, options = read(tmp_path, changed(TWO_HOSTS, "models.0.flags.tensor-parallel-size", 8))
    with pytest.raises(FleetError, match="an instance takes 8 GPUs, and no host has as many"):
        replicas(file.fleet, options)


@pytest.mark.parametrize("content", [TWO_HOSTS, BEHIND_EDGES], ids=["one model", "edges"])
def test_every_command_is_one_that_a_service_takes(tmp_path: Path, content: Any) -> None:
    # The edge looks whether there are keys.
    for plan in plans(tmp_path, content).values():
        for part in plan.parts:
            if part.tier is not Tier.ETCD:
                parse_serve(part.command[2:])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="Debian package systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    awkward = changed(TWO_HOSTS, "models.0.flags.speculative-config", {"method": "ngram", "n": "a b%c$d'e"})
    file, options = read(tmp_path, awkward)
    for host in file.fleet.hosts:
        folder = tmp_path / host
        folder.mkdir()
        for name, text in systemd(file.fleet, options, host).files.items():
            if name.startswith("units/"):
                # The verifier requires the programs to exist.
                text = text.replace("/opt/tailrace/bin/", f"{sysconfig.get_path('scripts')}/")
                (folder / Path(name).name).write_text(text.replace("/usr/bin/etcd", "/bin/true"))
        assert_systemd_accepts(folder)


def test_units_are_those_of_the_processes(tmp_path: Path) -> None:
    file, options = read(tmp_path, TWO_HOSTS)
    made = systemd(file.fleet, options, "a")
    units = {
        Path(name).stem.removeprefix("tailrace-"): text
        for name, text in made.files.items()
        if ".service" in name
    }
    assert set(units) == {part.name for part in plans(tmp_path)["a"].parts}
    for name, text in units.items():
        (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
        assert float(stop_s) > longest_s(name)
        assert ("PrivateDevices=yes" in text) == (not name.startswith("worker"))
        for line in ("NoNewPrivileges=yes", "ProtectSystem=strict", "User=tailrace", "Restart=always"):
            assert line in text.splitlines()
    assert "CUDA_VISIBLE_DEVICES=3" in units["worker-a-3"]
    # How many cores the host has is not known here.
    assert "OMP_NUM_THREADS" not in units["worker-a-3"]
    assert "--api-keys /etc/tailrace/keys.json" in units["frontend-a-0"]
    assert made.needs_keys and not systemd(file.fleet, options, "b").needs_keys


def test_a_part_may_take_as_long_as_its_flags_say(tmp_path: Path) -> None:
    file, options = read(tmp_path, changed(TWO_HOSTS, "models.0.flags.drain-timeout", "10m"))
    unit = systemd(file.fleet, options, "a").files["units/tailrace-worker-a-0.service"]
    assert "TimeoutStopSec=630" in unit
    assert "stop_grace_period: 630s" in compose(file.fleet, options, "a").files["compose.yaml"]


def test_start_scripts_are_shell(tmp_path: Path) -> None:
    file, options = read(tmp_path, TWO_HOSTS)
    for make in (systemd, compose):
        script = make(file.fleet, options, "a").files["start.sh"]
        subprocess.run(["sh", "-n"], input=script, text=True, check=True, timeout=WAIT_S)


def test_containers_are_valid(tmp_path: Path) -> None:
    file, options = read(tmp_path, TWO_HOSTS)
    paths = {host: tmp_path / f"{host}.yaml" for host in file.fleet.hosts}
    for host, path in paths.items():
        path.write_text(compose(file.fleet, options, host).files["compose.yaml"])
    # One call for all: most of what it takes is its start.
    program = f"{sysconfig.get_path('scripts')}/check-jsonschema"
    checked = [program, "--builtin-schema", "vendor.compose-spec", *map(str, paths.values())]
    result = subprocess.run(checked, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert result.returncode == 0, result.stdout
    for path in paths.values():
        services = yaml.safe_load(path.read_text())["services"]
        for service in services.values():
            assert service["read_only"] and service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("content", [TWO_HOSTS, BEHIND_EDGES], ids=["one model", "edges"])
def test_prometheus_finds_every_service(tmp_path: Path, content: Any) -> None:
    file, options = read(tmp_path, content)
    config = yaml.safe_load(prometheus(file.fleet, options, "groups: []")["prometheus.yml"])
    found = {
        target["labels"]["member"]: (target["targets"][0], job["scheme"])
        for job in config["scrape_configs"]
        for target in job["static_configs"]
    }
    for plan in plans(tmp_path, content).values():
        for part in plan.parts:
            if part.tier is not Tier.ETCD:
                port = option(part, "--metrics").rpartition(":")[2]
                assert found.pop(part.name) == (f"{part.address.rpartition(':')[0]}:{port}", "https")
    assert not found


def test_the_firewall_lets_the_fleet_in(tmp_path: Path) -> None:
    file, options = read(tmp_path, TWO_HOSTS)
    rules = systemd(file.fleet, options, "a").files["firewall.nft"]
    assert re.search(
        r"ip saddr \{ b\.example \} tcp dport \{ 2379, 2380, 7102, .*7105.*7300-7307.* \} accept", rules
    )
    assert "tcp dport { 8000 } accept" in rules


def test_a_unit_has_awkward_words_on_one_line(tmp_path: Path) -> None:
    content = changed(TWO_HOSTS, "environment", {"A": "x\nUser=root", "HF_HOME": "/models"})
    file, options = read(tmp_path, content)
    unit = systemd(file.fleet, options, "a").files["units/tailrace-worker-a-0.service"]
    assert r'Environment="A=x\nUser=root"' in unit.splitlines()
    assert re.findall("HF_HOME=.*", unit) == ["HF_HOME=/models"]


def test_a_start_script_leaves_units_of_others(tmp_path: Path) -> None:
    file, options = read(tmp_path, TWO_HOSTS)
    files = systemd(file.fleet, options, "a").files
    (mark,) = re.findall(r"grep -q '\^(.*)'", files["start.sh"])
    for name, text in files.items():
        assert text.startswith(mark) == name.endswith(".service")
    assert "# Ready: 10.0.0.1:7105 --tls /etc/tailrace/tls/issued/worker/worker-a-0" in "".join(
        files.values()
    )


def test_etcd_listens_on_an_address(tmp_path: Path) -> None:
    (member, *_) = plans(tmp_path, changed(TWO_HOSTS, "etcd", ["b"]))["b"].parts
    assert "--listen-client-urls=https://0.0.0.0:2379" in member.command
    assert "--listen-peer-urls=https://0.0.0.0:2380" in member.command
    assert "--advertise-client-urls=https://b.example:2379" in member.command


def test_rules_that_are_loaded_again_replace_the_old(tmp_path: Path) -> None:
    file, options = read(tmp_path, TWO_HOSTS)
    rules = [
        line
        for line in systemd(file.fleet, options, "a").files["firewall.nft"].splitlines()
        if not line.startswith("#")
    ]
    assert rules[:3] == ["table inet tailrace", "delete table inet tailrace", "table inet tailrace {"]


def test_a_folder_of_processes_has_its_keys_beside_the_file(tmp_path: Path) -> None:
    file, options = read(tmp_path, changed(TWO_HOSTS, "keys", "../secret/users.json"))
    text = processes(file.fleet, options, "a").files["fleet.yaml"]
    assert yaml.safe_load(text)["keys"] == "keys.json"


@pytest.mark.parametrize(
    ("http", "message"),
    [
        ("10.0.0.2:8000", "models[0].http: 10.0.0.2 is no address of host a, which has front ends"),
        ("0.0.0.0:7105", "models[0].http: port 7105 is one of Tailrace's own ports"),
        ("0.0.0.0:9101", "models[0].http: port 9101 is one of Tailrace's own ports"),
        ("0.0.0.0:2379", "models[0].http: port 2379 is one of Tailrace's own ports"),
    ],
)
def test_where_front_ends_cannot_listen(tmp_path: Path, http: str, message: str) -> None:
    with pytest.raises(FleetError) as caught:
        plans(tmp_path, changed(TWO_HOSTS, "models.0.http", http))
    assert str(caught.value).startswith(message)


def test_several_models_share_the_hosts(tmp_path: Path) -> None:
    made = plans(tmp_path, BEHIND_EDGES)
    gpus = {
        part.name: part.environment.get("CUDA_VISIBLE_DEVICES", "")
        for plan in made.values()
        for part in plan.parts
        if part.tier in (Tier.WORKER, Tier.FRONTEND, Tier.EDGE)
    }
    assert gpus == {
        "chat-worker-a-0": "0,1",
        "coder-worker-a-0": "2",
        "coder-worker-a-1": "3",
        "chat-frontend-a-0": "",
        "edge-a": "",
        "chat-worker-b-0": "0,1",
        "coder-frontend-b-0": "",
        "coder-frontend-b-1": "",
        "edge-b": "",
    }
    # Each has the memory of its GPUs for itself.
    workers = [part for plan in made.values() for part in plan.tier(Tier.WORKER)]
    assert {option(part, "--gpu-memory-utilization") for part in workers} == {"0.900"}
    assert made["a"].http == made["b"].http == "http://10.0.0.1:8000"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None, None), [{"a": 1, "b": 0}, {"a": 1, "b": 1}, {"a": 2, "b": 1}]),
        ((None, {"a": 4}, {"b": 1}), [{"a": 0, "b": 1}, {"a": 4, "b": 0}, {"a": 0, "b": 1}]),
        ((None, 5, {"b": 1}), "models[0].replicas: an instance takes 1 GPUs, and no host has as many left"),
        ((None, {"a": 5}, None), "models[1].replicas: host a has 4 GPUs"),
        ((1, {"b": 2}, {"b": 1}), "models[2].replicas: host b has 2 GPUs, and with it the models' instances"),
    ],
)
def test_gpus_are_counted_over_models(tmp_path: Path, given: Any, expected: Any) -> None:
    models = [
        {"model": f"/m{at}", **({} if each is None else {"replicas": each})} for at, each in enumerate(given)
    ]
    file, options = read(tmp_path, changed(BEHIND_EDGES, "models", models))
    if isinstance(expected, str):
        with pytest.raises(FleetError) as caught:
            replicas(file.fleet, options)
        assert str(caught.value).startswith(expected)
    else:
        assert replicas(file.fleet, options) == expected


def test_more_front_ends_than_a_host_has_ports_for(tmp_path: Path) -> None:
    models = [{"model": f"/m{at}", "engine": "simulated", "frontends": 8} for at in range(3)]
    with pytest.raises(FleetError, match=r"models\[2\].frontends: 24 front ends would be on host a, which"):
        plans(tmp_path, changed(BEHIND_EDGES, "models", models))


def test_front_ends_behind_edges_take_certificates(tmp_path: Path) -> None:
    made = plans(tmp_path, BEHIND_EDGES)
    (chat,) = made["a"].tier(Tier.FRONTEND)
    assert (option(chat, "--http"), chat.http) == ("10.0.0.1:8101", "https://10.0.0.1:8101")
    own = "/tls/issued/frontend/chat-frontend-a-0"
    assert option(chat, "--ssl-certfile") == f"{own}/tls.crt"
    assert option(chat, "--ssl-ca-certs") == f"{own}/ca.crt"
    assert option(chat, "--ssl-cert-reqs") == "2"
    # Each has a port of its own: an edge sees it if one hangs.
    assert [option(part, "--http") for part in made["b"].tier(Tier.FRONTEND)] == [
        "0.0.0.0:8101",
        "0.0.0.0:8102",
    ]
    assert {
        option(part, "--api-keys")
        for plan in made.values()
        for part in (*plan.tier(Tier.FRONTEND), *plan.tier(Tier.EDGE))
    } == {"/keys.json"}
    # On several machines, that is the one without being named.
    assert option(chat, "--front") == "python" and "--enable-ssl-refresh" in chat.command
    rust = changed(changed(BEHIND_EDGES, "keys", None), "http", "127.0.0.1:8000")
    (chat,) = plans(tmp_path, changed(rust, "models.0.front", "rust"))["a"].tier(Tier.FRONTEND)
    assert "--ssl-cert-reqs" in chat.command and "--enable-ssl-refresh" not in chat.command
    clear = changed(changed(BEHIND_EDGES, "tls", None), "insecure", True)
    (chat,) = plans(tmp_path, clear)["a"].tier(Tier.FRONTEND)
    assert "--ssl-certfile" not in chat.command and "--insecure" in chat.command


def test_an_edge_needs_no_front_end_beside_it(tmp_path: Path) -> None:
    content = changed(changed(BEHIND_EDGES, "edges", None), "control", ["b", "a"])
    made = plans(tmp_path, content)
    assert [part.name for part in made["b"].tier(Tier.EDGE)] == ["edge-b"]
    assert not made["a"].tier(Tier.EDGE)
    # By default, they are beside the first edge.
    assert next(part.name for part in made["b"].tier(Tier.FRONTEND)) == "chat-frontend-b-0"
    assert made["a"].http == "http://b.example:8000"
    file, options = read(tmp_path, content)
    assert systemd(file.fleet, options, "b").needs_keys and not systemd(file.fleet, options, "a").needs_keys


def test_the_firewall_lets_edges_alone_reach_front_ends(tmp_path: Path) -> None:
    content = changed(BEHIND_EDGES, "hosts.c", {"address": "10.0.0.3"})
    content = changed(changed(content, "edges", ["a"]), "models.1.frontends", {"b": 1, "c": 1})
    file, options = read(tmp_path, content)
    rules = {host: systemd(file.fleet, options, host).files["firewall.nft"] for host in file.fleet.hosts}
    assert "tcp dport { 8000 } accept" in rules["a"]
    for host in ("b", "c"):
        assert "8000" not in rules[host]
        accepted = [line for line in rules[host].splitlines() if re.search(r"\b8101\b.* accept", line)]
        assert accepted == ["    ip saddr { 10.0.0.1 } tcp dport { 8101 } accept"]
        assert re.search(r"\b8101\b.* drop", rules[host])


@pytest.mark.parametrize(
    ("http", "message"),
    [
        ("10.0.0.2:8000", "http: 10.0.0.2 is no address of host a, which has an edge"),
        ("0.0.0.0:8101", "http: port 8101 is one of Tailrace's own ports"),
    ],
)
def test_where_an_edge_cannot_listen(tmp_path: Path, http: str, message: str) -> None:
    with pytest.raises(FleetError) as caught:
        plans(tmp_path, changed(BEHIND_EDGES, "http", http))
    assert str(caught.value).startswith(message)


# A model with a policy of its own beside one without.
OWN: Any = changed(BEHIND_EDGES, "models.1.policy", {"name": "pascal"})


def test_a_policy_of_its_own_has_services_on_the_control_hosts(tmp_path: Path) -> None:
    made = plans(tmp_path, {**OWN, "cluster": "prod"})
    for host, plan in made.items():
        control = {part.name: part for part in plan.tier(Tier.CONTROL)}
        kinds = ("monitor", "migration", "scheduler")
        assert [*control] == [f"{prefix}{kind}-{host}" for prefix in ("", "coder-") for kind in kinds]
        for name, part in control.items():
            expected = "prod.coder" if name.startswith("coder-") else "prod"
            assert option(part, "--cluster") == expected
            parse_serve(part.command[2:])
        journals = {option(control[f"{prefix}migration-{host}"], "--journal") for prefix in ("", "coder-")}
        assert journals == {"/data/migrations.jsonl", "/data/coder-migrations.jsonl"}
        for part in (*plan.tier(Tier.WORKER), *plan.tier(Tier.FRONTEND)):
            assert option(part, "--cluster") == ("prod.coder" if part.name.startswith("coder-") else "prod")
    # An edge serves the clusters that belong to its own.
    assert {option(part, "--cluster") for plan in made.values() for part in plan.tier(Tier.EDGE)} == {"prod"}
    assert {plan.admin for plan in made.values()} == {"10.0.0.1:7101,b.example:7101"}
    (own,) = {tuple(plan.own.items()) for plan in made.values()}
    schedulers = [part.address for plan in made.values() for part in plan.parts if "coder-sch" in part.name]
    assert own == (("prod.coder", ",".join(schedulers)),)
    # Its spans go where its traces are looked for.
    (monitor,) = (part.address for part in made["a"].parts if part.name == "coder-monitor-a")
    spans = {
        part.environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        for plan in made.values()
        for part in plan.parts
        if part.name.startswith("coder-")
    }
    assert spans == {f"https://{monitor}"}
    assert made["b"].environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://10.0.0.1:7102"


def test_control_hosts_alone_have_the_services_of_a_policy(tmp_path: Path) -> None:
    made = plans(tmp_path, changed(OWN, "control", ["a"]))
    assert not made["b"].tier(Tier.CONTROL) and made["b"].own == made["a"].own
    file, options = read(tmp_path, changed(OWN, "control", ["a"]))
    folder = systemd(file.fleet, options, "a")
    assert {identity.name for identity in folder.identities} >= {"coder-scheduler-a", "coder-monitor-a"}
    assert "units/tailrace-coder-scheduler-a.service" in folder.files


def test_each_cluster_is_a_label_of_its_targets(tmp_path: Path) -> None:
    file, options = read(tmp_path, OWN)
    config = yaml.safe_load(prometheus(file.fleet, options, "groups: []")["prometheus.yml"])
    labels = [target["labels"] for job in config["scrape_configs"] for target in job["static_configs"]]
    for each in labels:
        own = "default.coder" if each["member"].startswith("coder-") else "default"
        assert each["cluster"] == own
