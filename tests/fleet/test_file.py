"""fleet.yaml: what is accepted, and which field an error names."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cli.errors import UsageProblem
from tailrace.cli.main import main
from tailrace.cli.up import on_this_machine
from tailrace.fleet.file import FleetError, Model, json_schema, read_fleet, to_yaml
from tailrace.local.options import Bounds, OwnCluster
from tests.fleet.files import MODEL, ONE_MACHINE, TWO_HOSTS, changed, read, write
from tests.waiting import WAIT_S


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("modles", [], "unknown field 'modles' (did you mean 'models'?)"),
        ("models", [], "models: Expected a list of length >= 1"),
        ("models.0.modell", "x", "models[0]: unknown field 'modell' (did you mean 'model'?)"),
        ("models.0.replicas", "many", "models[0].replicas: Expected"),
        ("models.0.replicas", {"c": 1}, "models[0].replicas: 'c' is none of the hosts (a, b)"),
        ("models.0.frontends", {"c": 1}, "models[0].frontends: 'c' is none of the hosts (a, b)"),
        ("models.0.http", "8000", "models[0].http: '8000' is not HOST:PORT"),
        ("models.0.front", "both", "models[0].front: both: on one machine only; python, or rust"),
        ("models.0.engine", "vlmm", "models[0].engine: 'vlmm' is none of vllm, simulated"),
        ("hosts.b.address", "10.0.0.1", "hosts.a.address: 10.0.0.1 is there twice"),
        ("hosts.b.address", "10.0.0.2:22", "hosts.b.address: '10.0.0.2:22': without a port, please"),
        ("hosts.b.address", "10.0.0.999", "hosts.b.address: '10.0.0.999' is no IPv4 address"),
        ("hosts.b.address", "10.0.0", "hosts.b.address: '10.0.0' is no IPv4 address"),
        ("hosts.b.address", "fd00::1::2", "hosts.b.address: 'fd00::1::2' is neither a name nor an address"),
        ("hosts.b.address", "[fd00::1]", "hosts.b.address: '[fd00::1]' is neither a name nor an address"),
        ("hosts.b.address", "localhost", "hosts.b.address: 'localhost': the other hosts do not reach it"),
        ("hosts.b.address", "0.0.0.0", "hosts.b.address: '0.0.0.0': the other hosts do not reach it"),
        ("models.0.http", "1.2.3.999:80", "models[0].http: '1.2.3.999:80': 1.2.3.999 is no IPv4 address"),
        ("models.0.http", "a:99999", "models[0].http: 'a:99999': port 99999 is not from 1 to 65535"),
        ("etcd", ["10.0.0.9:0"], "etcd: '10.0.0.9:0': port 0 is not from 1 to 65535"),
        ("hosts.b.gpus", -1, "hosts.b.gpus: Expected a whole number >= 0"),
        ("hosts.b.adress", "x", "hosts.b: unknown field 'adress' (did you mean 'address'?)"),
        ("policy.nmae", "x", "policy: unknown field 'nmae' (did you mean 'name'?)"),
        ("tls", "yes please", "tls: Expected true or false, got a text"),
        ("control", ["a", "a"], "control: a host is there twice"),
        ("control", ["c"], "control: 'c' is none of the hosts (a, b)"),
        ("etcd", ["a", "10.0.0.9:2379"], "etcd: names of hosts and addresses do not go together"),
        ("etcd", [], "etcd: name the hosts that run a member"),
        ("keys", None, "keys: users on other machines reach 0.0.0.0:8000: name a file of keys"),
        ("tls", None, "tls: several hosts need tls: true"),
        ("policy", {"name": "magic"}, "policy.name: unknown policy 'magic'"),
        (
            "policy",
            {"name": "pascal", "parameters": {"quantum_tokens": 0}},
            "policy.parameters: policy 'pascal'",
        ),
        ("slo", {"ttft": "soon"}, "slo: slo, parameter 'ttft': 'soon' is not allowed"),
        (
            "slo",
            {"ttft": "2x"},
            "slo: slo, parameter 'ttft': '2x' is not allowed; it is a number from 0 to 1e+06 (s, such as "
            "2s or 150ms)",
        ),
        ("slo", {"ttfb": 1}, "slo: slo has no parameter 'ttfb'"),
        ("cluster", "A B", "cluster: Expected a name of 1 to 40 characters"),
        ("environment", {"A B": "x"}, "environment: 'A B': Expected a variable's name"),
        ("environment", {"A": "x", "B": 1}, "environment.B: Expected a text, got a whole number"),
        (
            "hosts",
            {"b/../x": {"address": "x"}},
            "hosts: 'b/../x': Expected a name of 1 to 40 characters: a to z",
        ),
        ("models.0.replicas", {"B_1": 1}, "models[0].replicas: 'B_1': Expected a name of 1 to 40 characters"),
        (
            "models.0.flags",
            {"a": 1, "max-model-len": None},
            "models[0].flags.max-model-len: Expected a value",
        ),
        ("models.0.flags", {"a.b": [{}]}, "models[0].flags['a.b'][0]: Expected a single value"),
        ("models.0.flags", {"a": {1: 2}}, "models[0].flags.a: '1': Expected a text, got a whole number"),
        ("models.0.front", "node", "models[0].front: 'node' is none of auto, both, python, rust"),
        ("models.0.front", "x - at `$a[...]`", "models[0].front: 'x - at `$a[...]`' is none of auto, "),
        ("kubernetes", {"etcd": 2}, "kubernetes.etcd: 2 is none of 1, 3, 5"),
        ("kubernetes", {"gpu": "x"}, "kubernetes.gpu: Expected a resource of Kubernetes's, such as nvidia"),
        ("kubernetes", {"etcd": []}, "kubernetes.etcd: at least one HOST:PORT"),
        ("kubernetes", {"etcd": ["a:1", "localhost:2379"]}, "kubernetes.etcd: localhost:2379 is each pod"),
        ("kubernetes", {"etcd": ["127.0.0.1:2379"]}, "kubernetes.etcd: 127.0.0.1:2379 is each pod itself"),
        ("kubernetes", {"cpu": "4Gi"}, "kubernetes.cpu: Expected CPUs as Kubernetes has them"),
        ("kubernetes", {"memory": "500m"}, "kubernetes.memory: Expected bytes as Kubernetes has them"),
        ("kubernetes", {"storage": "1m"}, "kubernetes.storage: Expected bytes as Kubernetes has them"),
        ("models.0.kubernetes", {"memory": "1m"}, "models[0].kubernetes.memory: Expected bytes"),
        ("kubernetes", {"prometheus": "not a url"}, "kubernetes.prometheus: 'not a url' is not http://HOST"),
        ("models.0.model", " ", "models[0].model: ' ' is neither a folder nor a name"),
        ("models.0.model", "--help", "models[0].model: '--help' is neither a folder nor a name"),
        (
            "models.0.flags",
            {"served-model-name": ""},
            "models[0].flags: served-model-name: a name is empty",
        ),
        ("models.0.flags", {"served_model_name": []}, "models[0].flags: served_model_name: a name is empty"),
        ("policy", "pascal", "policy: Expected a mapping, got a text (write {name: pascal})"),
        ("hosts.b", "10.0.0.2", "hosts.b: Expected a mapping, got a text (write {address: 10.0.0.2})"),
        ("traces", "monitr", "traces: 'monitr' is not monitor, none or http://HOST:PORT"),
        ("hosts.b.address", "$(reboot)", "hosts.b.address: '$(reboot)' is neither a name nor an address"),
        ("models.0.flags", {"-tp": 2}, "models[0].flags: '-tp': Expected a flag's long name"),
        ("models.0.flags", {"port": 9000}, "models[0].flags: port: models[0].http says it"),
        ("models.0.replicas", 0, "models[0].replicas: at least 1; none at the start needs autoscale"),
        ("models.0.autoscale", {"max": 2}, "models[0].autoscale: on several hosts nobody starts instances"),
        ("models.0.autoscale", {"mox": 2}, "models[0].autoscale: unknown field 'mox' (did you mean 'max'?)"),
        ("models.0.autoscale", {"max": 0}, "models[0].autoscale.max: Expected a whole number >= 1"),
        ("http", "0.0.0.0:80", "models[0].http: 0.0.0.0:80 is the address of all models"),
        ("edges", ["c"], "edges: 'c' is none of the hosts (a, b)"),
        ("edges", ["b", "b"], "edges: a host is there twice"),
        ("edges", ["a"], "edges: they need http"),
        (
            "models.0.flags",
            {"x": {"y": b"\x00"}},
            "models[0].flags: x: Object of type bytes",
        ),
    ],
)
def test_an_error_names_the_field(tmp_path: Path, place: str, value: Any, message: str) -> None:
    path = write(tmp_path, changed(TWO_HOSTS, place, value))
    with pytest.raises(FleetError) as caught:
        read_fleet(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("environment", {"VLLM_API_KEY": "a"}),
        ("models.0.flags", {"api_key": "a"}),
        ("models.0.flags", {"ssl-cert-reqs": 2}),
    ],
)
def test_vllms_own_protection_needs_no_file_of_keys(tmp_path: Path, place: str, value: Any) -> None:
    without = changed(changed(TWO_HOSTS, "keys", None), "insecure", True)
    read_fleet(write(tmp_path, changed(without, place, value)))
    with pytest.raises(FleetError, match="name a file of keys"):
        read_fleet(write(tmp_path, without))


@pytest.mark.parametrize(("http", "noted"), [("127.0.0.1:80", True), ("0.0.0.0:80", False)])
def test_loopback_on_several_hosts_is_noted(tmp_path: Path, http: str, noted: bool) -> None:
    model = {"model": "org/model", "engine": "simulated", "http": http}
    file = write(tmp_path, changed(TWO_HOSTS, "models", [model]))
    result = CliRunner().invoke(main, ["config", "check", "-f", str(file)])
    assert result.exit_code == 0
    assert ("models[0].http: 127.0.0.1:80 is reached from its own host alone" in result.stderr) is noted


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"min": 3}, "models[0].autoscale: min 3 exceeds max 2"),
        ({"cooldown": "soon"}, "models[0].autoscale.cooldown: 'soon' is not a duration of 1s to 1d"),
        ({"cooldown": 0}, "models[0].autoscale.cooldown: "),
        ({"cooldown": "2d"}, "models[0].autoscale.cooldown: '2d'"),
        ({"min": 1, "replicas": 0}, "models[0].replicas: a number from autoscale.min to autoscale.max"),
        ({"replicas": 3}, "models[0].replicas: a number from"),
        ({"replicas": {"a": 1}}, "models[0].replicas: "),
    ],
)
def test_bounds_of_the_number_of_instances(tmp_path: Path, model: dict[str, Any], message: str) -> None:
    own = {"replicas": model.pop("replicas")} if "replicas" in model else {}
    content = {"models": [{"model": "m", "autoscale": {"max": 2} | model} | own]}
    with pytest.raises(FleetError) as caught:
        read_fleet(write(tmp_path, content))
    assert str(caught.value).split(": ", 1)[1].startswith(message)


def test_the_number_at_the_start_is_that_of_replicas_or_the_least(tmp_path: Path) -> None:
    def read(**model: Any) -> Model:
        content = {"models": [{"model": "m", "autoscale": {"max": 4, "cooldown": "1.5m"}} | model]}
        return read_fleet(write(tmp_path, content)).model

    assert (read().number, read(replicas=3).number) == (0, 3)
    assert read(autoscale={"min": 2, "max": 2}).number == 2
    scale = read().autoscale
    assert scale is not None and scale.bounds == Bounds(0, 4, 90.0)


@pytest.mark.parametrize(
    "text",
    [
        "models: [&a {model: m, replicas: 1}, {<<: *a, replicas: 2}]",
        "models: [{<<: [{replicas: 1}, {model: x}], model: m}, {model: m, replicas: 2}]",
        # Merged before it is read itself.
        "models: [{&x <<: &a {<<: {model: n, replicas: 1}, model: m}}, {<<: *a, replicas: 2}]",
    ],
)
def test_mappings_are_merged(tmp_path: Path, text: str) -> None:
    names = "flags: {served-model-name: [a]}"
    models = yaml.safe_load(text)["models"]
    assert [(each["model"], each["replicas"]) for each in models] == [("m", 1), ("m", 2)]
    text = text.replace("replicas: 2}", f"replicas: 2, {names}}}")
    fleet = read_fleet(write(tmp_path, f"{text}\nhttp: 127.0.0.1:1"))
    assert [(each.model, each.replicas) for each in fleet.models] == [("m", 1), ("m", 2)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_link_is_no_other_model_to_scale(tmp_path: Path, number: int) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "m")
    models = [{"model": str(tmp_path / name), "replicas": 1} for name in ("m", "link")]
    models[number]["autoscale"] = {"max": 2}
    # Pods have the folders elsewhere: it is not said of these.
    _, options = read(tmp_path, {"http": "127.0.0.1:1", "models": models})
    with pytest.raises(UsageProblem, match=rf"models\[{number}\].autoscale: .* name the same folder"):
        on_this_machine(options, 1)


def test_models_that_cannot_be_told_apart_are_not_scaled(tmp_path: Path) -> None:
    models = [
        {"model": "m", "flags": {"served-model-name": name}, "autoscale": {"max": 1}} for name in ("a", "b")
    ]
    with pytest.raises(FleetError, match="another model has the same `model`"):
        read_fleet(write(tmp_path, {"http": "127.0.0.1:1", "models": models}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "models: [",
            "fleet.yaml: line 1, column 10: expected the node content, but found '<stream end>', "
            "while parsing a flow node",
        ),
        ("a: 1\n  b: [", "line 2, column 4: mapping values are not allowed here"),
        ("- a", "Expected a mapping, got a list"),
        ("", "missing required field models"),
        ("models: [{<<: {model: m}, <<: {}}]", "'<<' is there twice"),
        ("models: [{<<: {model: m, model: n}}]", "'model' is there twice"),
        ("models: []\nmodels: []\n", "'models' is there twice"),
        ("models: !!python/object:os.system []", "could not determine a constructor"),
        ("[" * 2000, "nested too deeply"),
        ("tls: !!bool x", "a value is not of the type that its tag (!!...) says"),
        ('models: [{model: "\\0"}]', "a character that no process can get"),
        ('models: [{model: "\\ud800"}]', "a character that no process can get"),
        ("models: [{model: /m, flags: {x: &a {b: *a}}}]", "models[0].flags: x: Circular reference"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FleetError, match=r"fleet\.yaml: ") as caught:
        read_fleet(write(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"\x7fELF\0\1", b"\xff\xfesss", bytes(range(256))])
def test_a_file_that_is_no_text(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_bytes(content)
    with pytest.raises(FleetError, match=r"fleet\.yaml: not YAML in UTF-8 \(position [0-9]+\)$"):
        read_fleet(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"none\.yaml: No such file or directory"):
        read_fleet(tmp_path / "none.yaml")
    with pytest.raises(FleetError, match="not a regular file"):
        read_fleet(Path("/dev/zero"))


def test_vllm_rs_with_keys_needs_an_edge(tmp_path: Path) -> None:
    content = {"models": [{**MODEL, "front": "rust"}], "keys": "keys.json"}
    with pytest.raises(FleetError, match=r"models\[0\].front: with keys, vllm-rs needs an edge"):
        read_fleet(write(tmp_path, content))
    assert read_fleet(write(tmp_path, {**content, "http": "127.0.0.1:8080"})).keys


@pytest.mark.parametrize("content", [ONE_MACHINE, TWO_HOSTS])
def test_the_schema_says_the_same(tmp_path: Path, content: dict[str, Any]) -> None:
    # It compiles dozens of grammars when it is imported.
    import jsonschema

    schema = json_schema()
    jsonschema.validate(content, schema)
    for wrong in (changed(content, "models.0.replicas", "many"), changed(content, "modles", 1)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    fleet = read_fleet(write(tmp_path, TWO_HOSTS))
    assert read_fleet(write(tmp_path, to_yaml(fleet))) == fleet


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = ["models", "hosts", "etcd", "control", "policy", "slo", "keys", "tls", "traces", "environment", "x"]


@given(st.sampled_from(_FIELDS), _VALUES)
def test_any_value_is_read_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, field: str, value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump({**TWO_HOSTS, field: value}))
    try:
        read_fleet(path)
    except FleetError as error:
        assert str(error).startswith(f"{path}: ")
        assert "\n" not in str(error)


@pytest.mark.parametrize("page", ["docs/fleet-file.md", "docs/tutorial.md"])
def test_the_files_of_the_docs_are_accepted(tmp_path: Path, page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text()
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE)
    files = [block for block in blocks if "models:" in block]
    assert files
    for block in files:
        read_fleet(write(tmp_path, textwrap.dedent(block).partition("\ntailrace render")[0]))


def test_no_engine_and_no_transport_are_needed(tmp_path: Path) -> None:
    """On an operator's laptop."""
    without = "import sys; sys.modules.update(dict.fromkeys(['vllm', 'torch', 'ucxx']))"
    command = f"{without}; from tailrace.cli.main import main; main(sys.argv[1:])"
    (tmp_path / "keys.json").write_text('{"tenants": [], "keys": []}')
    file = str(write(tmp_path, TWO_HOSTS))
    for arguments in (["config", "check", "-f", file], ["render", "systemd", "-f", file]):
        run = subprocess.run(
            [sys.executable, "-c", command, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert run.returncode == 0, run.stderr
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.glob("**/*.key")}
    assert modes == {0o600}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("http", None, "http: several models need HOST:PORT of one address for all"),
        ("http", "here", "http: 'here' is not HOST:PORT"),
        ("http", "0.0.0.0:8000", "keys: users on other machines reach 0.0.0.0:8000: name a file of keys"),
        ("models.1.http", "127.0.0.1:9000", "models[1].http: 127.0.0.1:8080 is the address of all models"),
        (
            "models.1.flags",
            {"served_model_name": "org/model"},
            "models[1]: users know it as 'org/model', and models[0] too",
        ),
        ("models.1.flags", {"host": "x"}, "models[1].flags: host: models[1].http says it"),
        (
            "models.1.policy",
            {"nam": "pascal"},
            "models[1].policy: unknown field 'nam' (did you mean 'name'?)",
        ),
        ("models.1.policy", {"name": "pascall"}, "models[1].policy.name: "),
        ("models.1.policy", {"name": "pascal", "parameters": {"x": 1}}, "models[1].policy.parameters: "),
        ("models.1.slo", {"ttfd": "2s"}, "models[1].slo: "),
        ("models.1.flags", {"ssl-certfile": "x"}, "models[1].flags: ssl-certfile: users reach the edge"),
        ("edges", ["a"], "edges: 'a' is none of the hosts (the file has none: it describes one machine)"),
    ],
)
def test_several_models(tmp_path: Path, place: str, value: Any, message: str) -> None:
    content = {"models": [MODEL, {"model": "/m/other"}], "http": "127.0.0.1:8080"}
    assert [each.served_name for each in read_fleet(write(tmp_path, content)).models] == [
        "org/model",
        "/m/other",
    ]
    path = write(tmp_path, changed(content, place, value))
    with pytest.raises(FleetError) as caught:
        read_fleet(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize("content", [ONE_MACHINE, TWO_HOSTS])
@pytest.mark.parametrize(("field", "value"), [("policy", {"name": "pascal"}), ("slo", {})])
def test_a_model_without_an_edge_has_the_policy_of_the_file(
    tmp_path: Path, content: Any, field: str, value: Any
) -> None:
    with pytest.raises(FleetError, match=rf"models\[0\]\.{field}: needs http"):
        read_fleet(write(tmp_path, changed(content, f"models.0.{field}", value)))


def test_a_model_states_a_policy_and_objectives_of_its_own(tmp_path: Path) -> None:
    models = [
        MODEL,
        {"model": "/m/coder", "policy": {"name": "pascal", "parameters": {"quantum_tokens": 250}}},
        {"model": "/n/coder", "slo": {"tpot": "90ms"}},
        {"model": "/o/coder", "slo": {}},
    ]
    content = {
        "models": models,
        "http": "127.0.0.1:8080",
        "cluster": "prod",
        "policy": {"name": "arrow"},
        "slo": {"ttft": "1s"},
    }
    _, options = read(tmp_path, content)
    assert [model.own for model in options.models] == [
        None,
        OwnCluster("prod.coder", "pascal", {"quantum_tokens": "250"}, {"ttft": 1.0}),
        OwnCluster("prod.coder-2", "arrow", {}, {"tpot": 0.09}),
        OwnCluster("prod.coder-3", "arrow", {}, {}),
    ]
    assert options.policy == "arrow" and options.cluster == "prod"
    assert read_fleet(write(tmp_path, to_yaml(read_fleet(write(tmp_path, content))))).models[3].slo == {}


def test_the_only_model_behind_an_edge_may_have_a_policy_of_its_own(tmp_path: Path) -> None:
    content = {"models": [{"model": "/m/coder", "policy": {}}], "http": "127.0.0.1:8080"}
    _, options = read(tmp_path, content)
    assert options.own is not None and options.prefix == "coder-"


def test_no_two_models_have_the_same_word(tmp_path: Path) -> None:
    models = [{"model": name} for name in ("a-2", "x/a", "y/a", "z/A!")]
    _, options = read(tmp_path, {"models": models, "http": "127.0.0.1:8080"})
    prefixes = [model.prefix for model in options.models]
    assert len({*prefixes}) == 4 and prefixes[:2] == ["a-2-", "a-"]
