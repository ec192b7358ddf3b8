"""The objects of a fleet on Kubernetes."""

from __future__ import annotations

import base64
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tailrace.cli.errors import UsageProblem
from tailrace.cli.fleet_file import common_options, read_fleet_file
from tailrace.cli.render import render as cli_render
from tailrace.fleet.file import Fleet, FleetError
from tailrace.fleet.kubernetes import OPTIONAL, identities
from tailrace.local.options import ClusterOptions
from tailrace.security.access import METHODS
from tailrace.security.authority import Authority
from tailrace.security.roles import MEMBERS, Identity, Role
from tests.deploy.services import longest_s, parse_serve
from tests.fleet.files import PODS, changed, read, write
from tests.fleet.kubernetes_objects import ALERTS, EDGE, FLEETS, SMALL, check, find, fleet, pods, render
from tests.waiting import WAIT_S

every_fleet = pytest.mark.parametrize("name", FLEETS)


@every_fleet
def test_kubernetes_accepts_the_objects(name: str) -> None:
    made = fleet(name)
    known = [file for file in made if file not in (*OPTIONAL, "kustomization.yaml")]
    assert made["kustomization.yaml"][0]["resources"] == known
    for each in itertools.chain.from_iterable(made.values()):
        check(each)
    named = [(each["kind"], each["metadata"]["name"]) for file in known for each in made[file]]
    assert len(set(named)) == len(named)


@pytest.mark.slow  # the packages of schemas take 20 s to load
def test_others_accept_their_objects() -> None:
    modules = {
        "cert-manager.io/v1": "cert_manager.v1",
        "keda.sh/v1alpha1": "keda.v1alpha1",
        "monitoring.coreos.com/v1": "prometheus_operator.v1",
    }
    checked = set()
    for each in itertools.chain.from_iterable(fleet("gpu").values()):
        if each["apiVersion"] in modules:
            module = pytest.importorskip(f"cloudcoil.models.{modules[each['apiVersion']]}")
            accepted = getattr(module, each["kind"]).model_validate(each)
            # What it does not know is not in it.
            assert accepted.model_dump(mode="json", by_alias=True, exclude_unset=True) == each
            checked.add(each["kind"])
    assert checked == {"Issuer", "Certificate", "ScaledObject", "PodMonitor", "PrometheusRule"}


@every_fleet
def test_pods_run_what_services_take(name: str) -> None:
    made = fleet(name)
    secrets = {each["metadata"]["name"]: each for each in made.get("secrets.yaml", [])}
    issued = {
        each["spec"]["secretName"]
        for each in made.get("certificates.yaml", [])
        if "secretName" in each["spec"]
    }
    for spec in pods(made).values():
        (container,) = spec["containers"]
        kind = _kind(container)
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and security["capabilities"]["drop"] == ["ALL"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert {"readinessProbe", "livenessProbe"} <= set(container) or kind == "ranks"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        claims = {"etcd"} if kind == "etcd" else set()
        assert mounted == {volume["name"] for volume in spec["volumes"]} | claims
        for secret, keys in _mounted_secrets(spec):
            if secret not in issued:
                known = secrets[secret]
                assert set(keys) <= {*known.get("data", {}), *known.get("stringData", {})}
        if kind == "etcd":
            continue
        parse_serve(container["command"][2:] if kind != "ranks" else _as_node(container["command"][2:]))
        if kind not in ("ranks", "console"):
            assert (
                spec["terminationGracePeriodSeconds"] > longest_s(kind)
                or "--drain-timeout" in container["command"]
            )
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert f"0.0.0.0:{ports['grpc']}" in container["command"]
            assert f"0.0.0.0:{ports['metrics']}" in container["command"]


def _kind(container: Mapping[str, Any]) -> str:
    """Return which service a container is."""
    return container["command"][2] if container["command"][1] == "serve" else "etcd"


def _mounted_secrets(spec: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the secrets of a pod's volumes, and their keys."""
    for volume in spec["volumes"]:
        if "secret" in volume:
            yield volume["secret"]["secretName"], []
        for source in volume.get("projected", {}).get("sources", []):
            yield source["secret"]["name"], [item["key"] for item in source["secret"]["items"]]


def _as_node(command: list[str]) -> list[str]:
    """Return the command of further ranks as it is in a pod."""
    return [
        word.replace("$(LWS_LEADER_ADDRESS)", "worker-0.worker").replace("$(NODE)", "1") for word in command
    ]


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("usual", {"nvidia.com/gpu": 1}),
        ("large", {"nvidia.com/gpu": 2, "rdma/hca": 1}),
        ("nodes", {"nvidia.com/gpu": 8, "rdma/hca": 1}),
        ("cpu", {}),
        ("small", {}),
    ],
)
def test_an_instance_has_its_gpus(name: str, devices: dict[str, int]) -> None:
    for kind in {"worker", "ranks"} & set(pods(fleet(name))):
        limits = pods(fleet(name))[kind]["containers"][0]["resources"]["limits"]
        assert {each: count for each, count in limits.items() if each != "memory"} == devices


def test_pods_of_a_kind_share_a_certificate() -> None:
    made = fleet("usual")
    assert base64.b64decode(find(made, "Secret", "etcd-worker")["data"]["tls.key"]) == b"secret"
    (tls,) = [each["projected"] for each in pods(made)["worker"]["volumes"] if each["name"] == "tls"]
    assert [source["secret"]["name"] for source in tls["sources"]] == ["tls-worker", "etcd-worker"]
    assert {"key": "tls.key", "path": "etcd/tls.key"} in tls["sources"][1]["secret"]["items"]
    assert find(made, "Secret", "keys")["stringData"] == {"keys.json": '{"keys": []}'}
    # Only Prometheus's certificate, and no operator's, is beside the services'.
    names = {each["metadata"]["name"] for each in made["secrets.yaml"]}
    kinds = ("frontend", "migration", "monitor", "scheduler", "worker")
    tls_names = {f"tls-{kind}" for kind in (*kinds, "etcd", "prometheus")}
    assert names >= {"keys", *tls_names, *(f"etcd-{kind}" for kind in kinds)}
    assert not any("drain" in name or "console" in name for name in names)


def _read(folder: Path, content: Any) -> tuple[Fleet, ClusterOptions]:
    file, options = read(folder, content, common_options)
    return file.fleet, options


@pytest.mark.parametrize("name", ["gpu", "models"])
def test_cert_manager_makes_the_same_certificates(tmp_path: Path, name: str) -> None:
    authority = Authority.create(tmp_path / "certs")
    made = identities(*_read(tmp_path, FLEETS[name]))
    assert {Identity(Role.ADMIN, "drain"), Identity(Role.VIEWER, "console")} <= set(made)
    for identity, hosts in made.items():
        folder = authority.issue(identity, hosts=hosts).folder
        for prefix, path in (("tls", folder), ("etcd", folder / "etcd")):
            if prefix == "etcd" and identity.role not in MEMBERS:
                continue
            spec = find(fleet(name), "Certificate", f"{prefix}-{identity.name}")["spec"]
            expected = x509.load_pem_x509_certificate((path / "tls.crt").read_bytes())
            names = expected.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            assert spec["uris"] == names.get_values_for_type(x509.UniformResourceIdentifier)
            assert spec.get("dnsNames", []) == names.get_values_for_type(x509.DNSName)
            assert spec.get("ipAddresses", []) == [*map(str, names.get_values_for_type(x509.IPAddress))]
            (common,) = expected.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            assert spec["commonName"] == common.value
            usages = expected.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
            assert ("server auth" in spec["usages"]) == (ExtendedKeyUsageOID.SERVER_AUTH in usages)
            by_etcds = prefix == "etcd" or identity.role is Role.ETCD
            assert spec["issuerRef"]["name"] == ("etcd-authority" if by_etcds else "authority")


def test_what_others_read() -> None:
    made = fleet("large")
    scaled = find(made, "ScaledObject", "worker")["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (4, 16)
    # Applying it again must not undo the scaling.
    assert "replicas" not in find(made, "StatefulSet", "worker")["spec"]
    assert 'model="org/model"' in scaled["triggers"][0]["metadata"]["query"]
    assert find(made, "HTTPRoute", "frontend")["spec"]["parentRefs"] == [{"name": "web"}]
    elsewhere = find(fleet("gpu"), "HTTPRoute", "frontend")["spec"]["parentRefs"]
    assert elsewhere == [{"name": "web", "namespace": "gateways"}]
    assert find(made, "PrometheusRule", "alerts")["spec"] == yaml.safe_load(ALERTS)
    endpoint = find(made, "PodMonitor", "worker")["spec"]["podMetricsEndpoints"][0]
    assert endpoint["tlsConfig"]["serverName"] == "worker.tailrace.internal"
    assert set(OPTIONAL) <= set(made) and not {"scaling.yaml", "route.yaml"} & set(fleet("usual"))


def test_an_engine_may_span_pods() -> None:
    group = find(fleet("nodes"), "LeaderWorkerSet", "worker")["spec"]["leaderWorkerTemplate"]
    leader, node = (
        group[each]["spec"]["containers"][0]["command"] for each in ("leaderTemplate", "workerTemplate")
    )
    assert group["size"] == 2
    assert leader[leader.index("--nnodes") :][:4] == ["--nnodes", "2", "--master-addr", "$(POD_IP)"]
    assert node[3:] == ["--worker", "$(LWS_LEADER_ADDRESS):29600", "--node", "$(NODE)", "--insecure"]
    assert "--insecure" in leader
    scaled = render(changed(FLEETS["nodes"], "kubernetes.scale_to", 4))
    assert find(scaled, "ScaledObject", "worker")["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"


def test_with_tls_insecure_is_about_ranks_alone() -> None:
    """Users' requests need keys all the same."""
    made = fleet("nodes")
    (container,) = find(made, "Deployment", "frontend")["spec"]["template"]["spec"]["containers"]
    assert "--api-keys" in container["command"] and "--insecure" not in container["command"]
    with pytest.raises(UsageProblem, match=r"keys: users on other machines reach 0\.0\.0\.0:8000"):
        render(changed(FLEETS["nodes"], "keys", None))


def test_keda_may_scale_to_zero() -> None:
    flags = {"served-model-name": "chat"}
    content = changed(
        changed(PODS, "models.0.flags", flags), "models.0.autoscale", {"max": 3, "cooldown": "10m"}
    )
    content = changed(content, "models.0.replicas", None)
    made = render(content)
    spec = find(made, "ScaledObject", "worker")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["cooldownPeriod"]) == (0, 3, 0)
    # The label is the workers' --model, whatever users call it.
    assert f'{{model="{content["models"][0]["model"]}"}}' in spec["triggers"][0]["metadata"]["query"]
    commands = {kind: pod["containers"][0]["command"] for kind, pod in pods(made).items()}
    scheduler = commands["scheduler"]
    assert scheduler[scheduler.index("--desired-min") :] == [
        "--desired-min",
        "0",
        "--desired-cooldown",
        "600",
    ]
    assert "--instance-wait" in commands["frontend"]
    assert "replicas" not in find(made, "StatefulSet", "worker")["spec"]
    least = render(changed(content, "models.0.autoscale", {"min": 1, "max": 3}))
    spec = find(least, "ScaledObject", "worker")["spec"]
    assert spec["minReplicaCount"] == 1 and "cooldownPeriod" not in spec
    with pytest.raises(FleetError, match=r"kubernetes.scale_to: models\[0\].autoscale.max says it"):
        render(changed(content, "kubernetes.scale_to", 3))


def test_a_pod_ends_after_its_drain() -> None:
    def life(name: str, kind: str) -> tuple[int, list[str]]:
        spec = pods(fleet(name))[kind]
        lifecycle = spec["containers"][0].get("lifecycle", {"preStop": {"exec": {"command": []}}})
        return spec["terminationGracePeriodSeconds"], lifecycle["preStop"]["exec"]["command"]

    assert life("usual", "worker") == (120, [])
    assert life("usual", "frontend") == (365, ["sleep", "5"])
    # The preStop's 120 s, and 120 s of --drain-timeout with what a stop takes besides.
    seconds, command = life("gpu", "worker")
    drain = 'tailrace drain "$POD_NAME" --admin scheduler:7101 --tls /etc/tailrace/operator'
    assert seconds == 120 + 120 + 60
    assert command == ["sh", "-c", f"{drain} --timeout 120; {drain} --undrain; true"]


def test_probes_ask_what_each_part_has() -> None:
    def probe(name: str, kind: str, which: str) -> dict[str, Any]:
        found: dict[str, Any] = pods(fleet(name))[kind]["containers"][0][which]
        return found

    assert probe("gpu", "frontend", "readinessProbe")["httpGet"] == {
        "path": "/ready",
        "port": 8000,
        "scheme": "HTTP",
    }
    assert probe("gpu", "frontend", "livenessProbe")["httpGet"]["path"] == "/health"
    # Users can connect, whether or not there is an instance yet.
    assert probe("gpu", "frontend", "startupProbe")["exec"]["command"][3:] == [
        "127.0.0.1:7104",
        "--tls",
        "/etc/tailrace/tls",
    ]
    assert probe("small", "worker", "readinessProbe")["grpc"] == {"port": 7105}
    assert probe("small", "scheduler", "livenessProbe")["tcpSocket"] == {"port": 7101}
    rust = pods(render(changed(SMALL, "models.0.front", "rust")))["frontend"]["containers"][0]
    assert rust["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 9104, "scheme": "HTTP"}


def _reach(name: str) -> Callable[[str, int], set[str]]:
    """Return what tells which kinds of pods reach a port of a kind; other: everybody."""
    made = fleet(name)
    policies = {each["metadata"]["name"]: each["spec"] for each in made["network.yaml"]}
    assert set(policies) == set(pods(made))
    for kind, spec in policies.items():
        assert spec["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == kind

    def reach(kind: str, port: int) -> set[str]:
        found: set[str] = set()
        for rule in policies[kind]["ingress"]:
            if any(
                each["port"] <= port <= each.get("endPort", each["port"]) for each in rule.get("ports", [])
            ):
                selectors = [
                    each["podSelector"]["matchExpressions"][0]["values"] for each in rule.get("from", [])
                ]
                found |= {*itertools.chain.from_iterable(selectors)} or {"other"}
        return found

    return reach


@pytest.mark.parametrize("name", [name for name, content in FLEETS.items() if "http" not in content])
def test_each_port_is_for_who_needs_it(name: str) -> None:
    made, reach = fleet(name), _reach(name)
    policies = {each["metadata"]["name"] for each in made["network.yaml"]}
    drains = "drain" in FLEETS[name].get("kubernetes", {})
    console = "console" in FLEETS[name].get("kubernetes", {})
    assert reach("scheduler", 7101) == {"frontend", "scheduler"} | ({"worker"} if drains else set()) | (
        {"console"} if console else set()
    )
    assert reach("monitor", 7102) == {"frontend", "migration", "monitor", "scheduler", "worker"}
    assert reach("migration", 7103) == {"scheduler", "worker"}
    assert reach("worker", 7105) == {"migration", "scheduler", "worker"}
    assert reach("worker", 7205) == {"frontend"} and reach("worker", 7363) == {"worker"}
    assert reach("frontend", 8000) == {"other"} and reach("frontend", 7104) == {"frontend"}
    assert reach("worker", 9105) == ({"other"} if "tls" in FLEETS[name] else set())
    if "etcd" in policies:
        assert reach("etcd", 2380) == {"etcd"} and "console" not in reach("etcd", 2379)


def test_each_port_is_for_those_of_its_cluster() -> None:
    reach = _reach("models")
    assert reach("scheduler", 7101) == {
        "chat-frontend",
        "vision-frontend",
        "scheduler",
        "chat-worker",
        "vision-worker",
        "console",
    }
    assert reach("coder-scheduler", 7101) == {"coder-frontend", "coder-scheduler", "coder-worker", "console"}
    assert reach("coder-frontend", 7104) == {"coder-frontend", "edge"}
    assert reach("coder-monitor", 7102) == {
        f"coder-{kind}" for kind in ("frontend", "migration", "monitor", "scheduler", "worker")
    }
    assert "edge" in reach("monitor", 7102) and "coder-worker" not in reach("monitor", 7102)
    assert reach("coder-worker", 7205) == {"coder-frontend"}
    # Users reach the edge, and that alone the front ends.
    assert reach("edge", 8000) == {"other"}
    assert reach("chat-frontend", 8101) == reach("coder-frontend", 8101) == {"edge"}
    assert {"edge", "chat-worker", "coder-scheduler"} <= reach("etcd", 2379)
    assert reach("etcd", 2380) == {"etcd"}
    span = _reach("edge")
    assert span("coder-worker", 29600) == set() and span("coder-frontend", 8101) == {"edge"}


def test_each_model_has_its_pods() -> None:
    made = fleet("models")
    commands = {name: pod["containers"][0]["command"] for name, pod in pods(made).items()}

    def option(name: str, flag: str) -> str:
        found: str = commands[name][commands[name].index(flag) + 1]
        return found

    kinds = ("monitor", "migration", "scheduler")
    models = {f"{model}-{kind}" for model in ("chat", "coder", "vision") for kind in ("worker", "frontend")}
    assert set(commands) == {"etcd", "edge", "console", *kinds, *(f"coder-{kind}" for kind in kinds), *models}
    # Those of the model with a policy of its own are in its cluster.
    clusters = {name: option(name, "--cluster") for name in commands if name not in ("etcd", "console")}
    assert {name for name, cluster in clusters.items() if cluster == "default.coder"} == {
        name for name in commands if name.startswith("coder-")
    }
    assert set(clusters.values()) == {"default", "default.coder"}
    assert option("edge", "--http") == "0.0.0.0:8000" and option("chat-frontend", "--http") == "0.0.0.0:8101"
    assert option("edge", "--api-keys") == option("coder-frontend", "--api-keys")
    assert "--ssl-cert-reqs" in commands["coder-frontend"] and "--ssl-certfile" not in commands["edge"]
    # What the fleet's cluster scales, and what the other one does.
    assert option("scheduler", "--desired-min") == "0" and option("coder-scheduler", "--desired-min") == "1"
    worker = pods(made)["coder-worker"]["containers"][0]
    assert "--enable-lora" in worker["command"] and worker["resources"]["requests"]["memory"] == "64Gi"
    spans = {each["name"]: each.get("value") for each in worker["env"]}
    assert spans["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://coder-monitor:7102"
    drain = worker["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert "--admin coder-scheduler:7101" in drain
    limits = pods(made)["chat-worker"]["containers"][0]["resources"]["limits"]
    assert limits == {"memory": "128Gi", "nvidia.com/gpu": 2}
    edge = pods(made)["edge"]["containers"][0]
    assert edge["image"].endswith("/tailrace-control:0.1.0")
    assert edge["readinessProbe"]["httpGet"] == {"path": "/health", "port": 8000, "scheme": "HTTP"}
    # A front end takes nobody without a certificate, not even the kubelet.
    front_end = pods(made)["chat-frontend"]["containers"][0]
    assert "exec" in front_end["readinessProbe"] and "tcpSocket" in front_end["livenessProbe"]
    in_clear = pods(fleet("edge"))["coder-frontend"]["containers"][0]
    assert in_clear["readinessProbe"]["httpGet"]["port"] == 8101
    services = {each["metadata"]["name"] for each in made["fleet.yaml"] if each["kind"] == "Service"}
    assert "edge" in services and not any("frontend" in name for name in services)
    assert find(made, "Service", "edge")["spec"]["type"] == "LoadBalancer"
    (rule,) = find(made, "HTTPRoute", "edge")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "edge", "port": 8000}]
    budgets = {each["metadata"]["name"] for each in made["fleet.yaml"] if "Budget" in each["kind"]}
    assert {"chat-worker", "coder-worker", "vision-worker", "coder-scheduler", "edge"} <= budgets
    assert "vision-frontend" not in budgets


def test_each_model_is_scaled_by_its_own_load() -> None:
    made = fleet("models")
    assert {each["metadata"]["name"] for each in made["scaling.yaml"]} == {"coder-worker", "vision-worker"}
    coder, vision = (find(made, "ScaledObject", f"{name}-worker")["spec"] for name in ("coder", "vision"))
    assert (coder["minReplicaCount"], coder["maxReplicaCount"]) == (1, 8) and "cooldownPeriod" not in coder
    assert (vision["minReplicaCount"], vision["cooldownPeriod"]) == (0, 0)
    assert coder["scaleTargetRef"]["name"] == "coder-worker"
    query = 'max(tailrace_desired_instances{cluster="default.coder",model="/models/qwen3-coder"})'
    assert coder["triggers"][0]["metadata"]["query"] == query
    relabelings = find(made, "PodMonitor", "coder-scheduler")["spec"]["podMetricsEndpoints"][0]["relabelings"]
    assert {"targetLabel": "cluster", "replacement": "default.coder"} in relabelings
    assert "replicas" not in find(made, "StatefulSet", "vision-worker")["spec"]
    assert find(made, "StatefulSet", "chat-worker")["spec"]["replicas"] == 2
    # In one cluster, the schedulers have the shortest cool-down, and the others wait for the rest.
    both = changed(FLEETS["models"], "models.1.policy", None)
    both = changed(changed(both, "models.1.slo", None), "models.1.autoscale.min", 0)
    made = render(both)
    vision = find(made, "ScaledObject", "vision-worker")["spec"]
    behavior = vision["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == vision["cooldownPeriod"] == 300
    assert find(made, "ScaledObject", "coder-worker")["spec"]["cooldownPeriod"] == 0


def test_a_model_may_span_pods_beside_one_that_does_not() -> None:
    made = fleet("edge")
    group = find(made, "LeaderWorkerSet", "coder-worker")["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    limits = group["workerTemplate"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 2
    assert find(made, "StatefulSet", "chat-worker")["spec"]["replicas"] == 1


def test_every_method_is_some_parts() -> None:
    # A service that is new in the table of who may call what has its place in the network policies.
    from tailrace.fleet.kubernetes import _SERVED_BY

    services = {method.split("/")[1].rpartition(".")[2] for method in METHODS}
    assert services - {"Health", "ServerReflection"} == set(_SERVED_BY)


def test_kubernetes_expands_only_what_is_the_pods_own() -> None:
    content = changed(PODS, "models.0.flags.chat-template", "{{ $(HOME) }} $5")
    command = pods(render(content))["worker"]["containers"][0]["command"]
    assert "{{ $$(HOME) }} $5" in command
    assert "$(POD_NAME)" in command and "$(POD_IP)" in command


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ("models.0.replicas", None, r"models\[0\].replicas: how many instances\?"),
        (
            "models.0.http",
            "127.0.0.1:8000",
            r"models\[0\].http: write 0.0.0.0:8000: a pod cannot listen on 127.0.0.1",
        ),
        ("models.0.http", "10.0.0.7:80", r"models\[0\].http: write 0.0.0.0:80: .* 10.0.0.7"),
        ("models.0.http", "api.example.com:80", r"models\[0\].http: write 0.0.0.0:80: .* api.example.com"),
        ("models.0.http", "0.0.0.0:7104", r"models\[0\].http: port 7104 is one of Tailrace's own ports"),
        ("models.0.http", "[::]:9104", r"models\[0\].http: port 9104 is one of Tailrace's own ports"),
        ("tls", False, "tls: pods need tls: true"),
        ("kubernetes", {"scale_to": 2}, "kubernetes.scale_to: fewer than"),
        ("models.0.frontends", {}, r"models\[0\].frontends: a number"),
        ("kubernetes", {"nodes": 2}, "kubernetes.nodes: 1 ranks .* cannot be divided among 2 pods"),
        ("models.0.flags", {"tensor-parallel-size": 2}, "insecure: true is needed with kubernetes.nodes"),
        ("models.0.engine", "simulated", "kubernetes.nodes: a simulated engine is one process"),
    ],
)
def test_what_kubernetes_cannot_run(place: str, value: Any, problem: str) -> None:
    content = changed(PODS, "kubernetes.nodes", 2) if "nodes" in problem else PODS
    with pytest.raises(FleetError, match=problem):
        render(changed(content, place, value))


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ("models.1.replicas", None, r"models\[1\].replicas: how many instances\?"),
        ("models.1.frontends", {}, r"models\[1\].frontends: a number"),
        ("http", "127.0.0.1:8000", "http: write 0.0.0.0:8000: a pod cannot listen on 127.0.0.1"),
        ("http", "0.0.0.0:7185", "http: port 7185 is one of Tailrace's own ports"),
        ("http", "0.0.0.0:9185", "http: port 9185 is one of Tailrace's own ports"),
        ("models.1.kubernetes", {"nodes": 3}, r"models\[1\].kubernetes.nodes: 4 ranks .* among 3 pods"),
        ("models.1.flags", {"served-model-name": "4o"}, r"models\[1\].flags: served-model-name: its first"),
        ("kubernetes", {"scale_to": 2}, "kubernetes.scale_to: of several models, autoscale of each says it"),
    ],
)
def test_which_models_kubernetes_cannot_run(place: str, value: Any, problem: str) -> None:
    with pytest.raises(FleetError, match=problem):
        render(changed(EDGE, place, value))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", "A"),
        ("storage_class", "a b"),
        ("certificates", "vault"),
        ("console", "root"),
        ("nodes", 0),
        ("drain", -1),
        ("secret", "x/y"),
        ("tolerations", []),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(Exception, match=f"kubernetes.*{field}"):
        read_fleet_file(write(tmp_path, changed(PODS, f"kubernetes.{field}", value)))


@pytest.mark.parametrize("kind", ["kubernetes", "helm"])
def test_the_command_writes_a_folder_and_says_what_to_do(tmp_path: Path, kind: str) -> None:
    file, out = write(tmp_path, FLEETS["gpu"]), tmp_path / "out"
    (tmp_path / "keys.json").write_text('{"tenants": [], "keys": []}')

    def run() -> list[str]:
        arguments = [kind, "-f", str(file), "--out", str(out), "--dir", str(tmp_path / "certs")]
        done = CliRunner().invoke(cli_render, arguments)
        assert done.exit_code == 0, done.output
        return done.stdout.splitlines()

    steps = run()
    assert out.stat().st_mode & 0o077 == 0
    # cert-manager makes the certificates: here is no authority, and operators fetch theirs.
    assert not (tmp_path / "certs").exists()
    first = f"kubectl apply --kustomize {out}" if kind == "kubernetes" else "kubectl create namespace llm"
    assert steps[0] == first
    assert f"tailrace apply -f {file} --admin 127.0.0.1:7101 --tls operator" in steps
    (fetch,) = [step for step in steps if step.startswith("mkdir") and "tls-operator" in step]
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "kubectl").write_text('#!/bin/sh\nprintf %s "$*"\n')
    (programs / "kubectl").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    subprocess.run(["sh", "-ec", fetch], cwd=tmp_path, check=True, env={"PATH": path}, timeout=WAIT_S)
    asked = '--output go-template={{index .data "tls.key" | base64decode}}'
    expected = f"--namespace llm get secret tls-operator {asked}"
    assert (tmp_path / "operator" / "tls.key").read_text() == expected
    # What the file does not ask for any more is gone.
    write(tmp_path, {**FLEETS["gpu"], "kubernetes": {"namespace": "llm"}})
    run()
    left = {path.name for path in out.rglob("*.yaml")}
    assert not left & {"route.yaml", "scaling.yaml", "certificates.yaml"} and "secrets.yaml" in left


def test_each_cluster_gets_its_rights_and_its_policy(tmp_path: Path) -> None:
    file = write(tmp_path, FLEETS["models"])
    (tmp_path / "keys.json").write_text('{"tenants": [], "keys": []}')
    done = CliRunner().invoke(cli_render, ["kubernetes", "-f", str(file), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    steps = done.stdout.splitlines()
    roles = "tailrace etcd-roles --apply --etcd 127.0.0.1:2379 --tls etcd-root"
    assert [step for step in steps if "etcd-roles" in step] == [roles, f"{roles} --cluster default.coder"]
    assert "kubectl --namespace llm port-forward service/coder-scheduler 7102:7101 &" in steps
    assert f"tailrace apply -f {file} --admin 127.0.0.1:7102 --model coder --tls operator" in steps


def test_hosts_are_chosen_by_kubernetes() -> None:
    content = {**PODS, "hosts": {"a": {"address": "10.0.0.1"}}, "etcd": ["a"], "schedulers": 1}
    with pytest.raises(FleetError, match="hosts: Kubernetes chooses the machines"):
        render(content)
