"""`fleet.yaml`: a deployment in one file, read and checked."""

from __future__ import annotations

import enum
import ipaddress
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta, Struct

from tailrace.address import MalformedAddress, is_ip, not_ipv4, parse_address
from tailrace.bounded import printable, read_regular, shown
from tailrace.durations import in_seconds
from tailrace.local.options import Bounds, ClusterOptions, Engine, Front
from tailrace.policy.parameters import ParameterError, format_value
from tailrace.policy.registry import UnknownPolicyError, UnusablePolicyError, load
from tailrace.security.options import exposed, is_loopback
from tailrace.slo import read_objectives
from tailrace.suggestion import did_you_mean
from tailrace.yaml_errors import yaml_problem

_FILE_BYTES: Final = 1 << 20
_DAY_S: Final = 86_400.0
_DEFAULTS: Final = ClusterOptions()
# A name in addresses, units and folders.
_NAME: Final = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
WORKERS_MAX: Final = 80
"""Most workers of a host: each has ports of its own (tailrace/fleet/hosts.py)."""
FRONTENDS_MAX: Final = 8
"""Most front ends of a host, of a model."""
MODELS_MAX: Final = 16

Name = Annotated[str, Meta(pattern=_NAME)]
Replicas = Annotated[int, Meta(ge=0, le=5_000)]
_CPUS: Final = r"^[1-9][0-9]*(m|\.[0-9]{1,3})?$"
Cpus = Annotated[str, Meta(pattern=_CPUS)]
_BYTES: Final = r"^[1-9][0-9]*((\.[0-9]+)?([kMGT]|[KMGT]i))?$"
Bytes = Annotated[str, Meta(pattern=_BYTES)]
# A name of Kubernetes's objects.
_CLASS: Final = r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$"
Class = Annotated[str, Meta(pattern=_CLASS)]
_RESOURCE: Final = r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"
Resource = Annotated[str, Meta(pattern=_RESOURCE)]
_REGISTRY: Final = r"^([A-Za-z0-9][A-Za-z0-9.:/_-]*)?$"
_GATEWAY: Final = r"^(([a-z0-9][a-z0-9-]*/)?[a-z0-9][a-z0-9.-]*)?$"
_VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
Value = bool | int | float | str
Objectives = dict[str, float | str]
# A host name, or an IPv4 or IPv6 address: it is written into commands and rules.
_ADDRESS: Final = r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)$"
_URL: Final = r"https?://[^\s/]"
# Flags for which the file has fields.
_FIELDS: Final = {"host": "http", "model": "model", "model-tag": "model", "port": "http"}
# Flags for HTTPS of an API server.
_HTTPS: Final = r"^(--)?ssl[-_]"
# No process can get these, and no file can hold them.
_UNWRITABLE: Final = re.compile("[\0\ud800-\udfff]")
_MERGE: Final = "tag:yaml.org,2002:merge"
_FLAG: Final = r"^(--)?[A-Za-z][A-Za-z0-9_.+-]*$"
Flags = dict[Annotated[str, Meta(pattern=_FLAG)], Value | list[Value] | dict[str, Any]]


class FleetError(ValueError):
    """A fleet file that cannot be used; the message names the field."""


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of the file."""


class Host(_Section, frozen=True):
    """A machine."""

    address: Annotated[
        str,
        Meta(min_length=1, max_length=253, description="Name or address by which the others reach it."),
    ]
    gpus: Annotated[int, Meta(ge=0, le=64, description="Number of its GPUs.")] = 0


class Policy(_Section, frozen=True):
    """The policy at the beginning, and its parameters."""

    name: Annotated[str, Meta(min_length=1, max_length=100)] = _DEFAULTS.policy
    parameters: dict[str, Value] = {}

    @property
    def texts(self) -> dict[str, str]:
        """Return the parameters as the admin API takes them."""
        return {name: format_value(value) for name, value in self.parameters.items()}


class Autoscale(_Section, frozen=True):
    """Bounds within which the number of instances follows their load (docs/scaling.md)."""

    max: Annotated[int, Meta(ge=1, le=1_000, description="Most instances.")]
    min: Annotated[
        int, Meta(ge=0, le=1_000, description="Least instances; 0: none while there are no requests.")
    ] = 0
    cooldown: Annotated[
        float | str,
        Meta(description="How long fewer must be enough before one is stopped: 10m. At most a day."),
    ] = "5m"

    @property
    def bounds(self) -> Bounds:
        """Return the bounds. Raise FleetError."""
        try:
            cooldown_s = float(in_seconds(str(self.cooldown)))
        except ValueError:
            cooldown_s = math.nan
        if not 1.0 <= cooldown_s <= _DAY_S:
            raise FleetError(f"cooldown: {shown(self.cooldown)} is not a duration of 1s to 1d")
        return Bounds(self.min, self.max, cooldown_s)


class ModelPods(_Section, frozen=True):
    """What pods of a model's instances have, if not as `kubernetes` of the file says."""

    gpus: Annotated[int, Meta(ge=0, le=64)] | None = None
    nodes: Annotated[int, Meta(ge=1, le=64)] | None = None
    cpu: Cpus | None = None
    memory: Bytes | None = None


class Model(_Section, frozen=True):
    """A model with its instances and front ends."""

    model: Annotated[str, Meta(min_length=1, description="Folder or name, as after `vllm serve`.")]
    flags: Annotated[
        Flags,
        Meta(
            description="Flags of `vllm serve` as a --config file has them, and options of `tailrace serve "
            "worker` and `tailrace serve frontend`."
        ),
    ] = {}
    replicas: Annotated[
        Replicas | dict[Name, Annotated[int, Meta(ge=0, le=WORKERS_MAX)]] | None,
        Meta(
            description="Number of instances, spread over the hosts, or by host; without: one for each GPU, "
            "or group of GPUs with tensor-parallel-size."
        ),
    ] = None
    autoscale: Annotated[
        Autoscale | None,
        Meta(description="Bounds of the number of instances; replicas, or min, is the number at the start."),
    ] = None
    frontends: Annotated[
        Annotated[int, Meta(ge=1, le=FRONTENDS_MAX)]
        | dict[Name, Annotated[int, Meta(ge=0, le=FRONTENDS_MAX)]],
        Meta(
            description="Number of front ends on the first control host, or that of edges, or by host; they "
            "share the port."
        ),
    ] = 1
    http: Annotated[str, Meta(description="HOST:PORT of the OpenAI API on each host with front ends.")] = (
        f"{_DEFAULTS.host}:{_DEFAULTS.port}"
    )
    front: Annotated[
        Front,
        Meta(
            description="vLLM's API server: python, rust, or on one machine both, with an edge; auto: both "
            "on one machine that can run them, otherwise python."
        ),
    ] = _DEFAULTS.front
    engine: Annotated[Engine, Meta(description="vllm, or simulated.")] = _DEFAULTS.engine
    policy: Annotated[
        Policy | None,
        Meta(description="A policy of its own: the model gets a cluster of its own. Without: the fleet's."),
    ] = None
    slo: Annotated[
        Objectives | None,
        Meta(description="Objectives of its own, in place of the fleet's; also with a cluster of its own."),
    ] = None

    kubernetes: Annotated[
        ModelPods, Meta(description="Of its instances' pods, if not as kubernetes of the file says.")
    ] = ModelPods()

    @property
    def has_cluster(self) -> bool:
        """Return whether it has a cluster of its own."""
        return self.policy is not None or self.slo is not None

    @property
    def number(self) -> int | None:
        """Return the number of instances, if it is not given by host; with autoscale, that of the start."""
        if self.replicas is None and self.autoscale is not None:
            return self.autoscale.min
        return self.replicas if isinstance(self.replicas, int) else None

    @property
    def served_name(self) -> str:
        """Return the name by which users know it."""
        for name, value in self.flags.items():
            if name.lstrip("-").replace("_", "-") == "served-model-name":
                return str(value[0] if isinstance(value, list) and value else value)
        return self.model


class Kubernetes(_Section, frozen=True):
    """What Kubernetes needs to know besides (docs/kubernetes.md)."""

    namespace: Name = "tailrace"
    registry: Annotated[
        str,
        Meta(
            pattern=_REGISTRY,
            description="Where the images tailrace-control and tailrace-engine are, without the last slash.",
        ),
    ] = ""
    etcd: Annotated[
        Literal[1, 3, 5] | list[str], Meta(description="Members of etcd, or HOST:PORT of members of yours.")
    ] = 3
    storage: Annotated[Bytes, Meta(description="Size of a member's volume.")] = "8Gi"
    storage_class: Annotated[
        Class, Meta(description="Of a member's volume; empty: the cluster's default.")
    ] = ""
    certificates: Annotated[
        Literal["tailrace", "cert-manager"],
        Meta(description="Who makes the certificates: the authority of `tailrace certs`, or cert-manager."),
    ] = "tailrace"
    secret: Annotated[
        Class,
        Meta(description="Secret with environment of workers and front ends, such as HF_TOKEN."),
    ] = ""
    gpu: Annotated[
        Resource, Meta(description="Resource of a GPU; an instance takes tensor x pipeline parallel of them.")
    ] = "nvidia.com/gpu"
    gpus: Annotated[
        Annotated[int, Meta(ge=0, le=64)] | None,
        Meta(description="GPUs of an instance, if not as many; 0: vLLM on CPUs."),
    ] = None
    nodes: Annotated[
        int, Meta(ge=1, le=64, description="Pods of an instance; more than 1: a LeaderWorkerSet.")
    ] = 1
    drain: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400,
            description="Seconds of a preStop that drains a worker through the scheduler, before SIGTERM "
            "does; with tls, workers then hold an operator's certificate. 0: none.",
        ),
    ] = 0
    console: Annotated[
        Literal["", "viewer", "admin"], Meta(description="Run the console, with these rights.")
    ] = ""
    rdma: Annotated[
        Resource | Literal[""], Meta(description="Resource of an RDMA device, such as rdma/hca.")
    ] = ""
    cpu: Annotated[Cpus, Meta(description="CPUs of an instance.")] = "4"
    memory: Annotated[Bytes, Meta(description="Memory of an instance.")] = "32Gi"
    models: Annotated[
        Name | Literal[""],
        Meta(description="PersistentVolumeClaim with models, mounted at /models in workers and front ends."),
    ] = ""
    service: Annotated[
        Literal["ClusterIP", "NodePort", "LoadBalancer"], Meta(description="How users reach the front ends.")
    ] = "ClusterIP"
    edges: Annotated[int, Meta(ge=1, le=64, description="Edges, with http.")] = 1
    gateway: Annotated[
        str,
        Meta(
            pattern=_GATEWAY,
            description="A Gateway, for an HTTPRoute: NAME, or NAMESPACE/NAME.",
        ),
    ] = ""
    scale_to: Annotated[
        int, Meta(ge=0, le=1000, description="Most instances, for a KEDA ScaledObject; 0: none.")
    ] = 0
    prometheus: Annotated[str, Meta(description="Prometheus's URL, for KEDA.")] = "http://prometheus:9090"


class Fleet(_Section, frozen=True):
    """A deployment: one cluster."""

    models: Annotated[
        list[Model], Meta(min_length=1, max_length=MODELS_MAX, description="Several need http.")
    ]
    http: Annotated[
        str,
        Meta(description="HOST:PORT of an edge: one address for all models."),
    ] = ""
    edges: Annotated[
        list[Name],
        Meta(max_length=16, description="Hosts of an edge on http. Without: the first control host."),
    ] = []
    cluster: Annotated[Name, Meta(description="Name of the cluster; several can share an etcd.")] = "default"
    hosts: Annotated[
        dict[Name, Host], Meta(description="The machines by name. Without: this machine alone, on loopback.")
    ] = {}
    etcd: Annotated[
        list[str], Meta(description="Hosts that run a member of etcd, or HOST:PORT of members of yours.")
    ] = []
    control: Annotated[
        list[Name],
        Meta(description="Hosts of a scheduler, a monitor and a migration service; two: one is the standby."),
    ] = []
    policy: Policy = Policy()
    slo: Annotated[Objectives, Meta(description="Objectives as tailrace set slo has them: ttft: 2s.")] = {}
    keys: Annotated[
        str, Meta(description="File of users' API keys and tenants (tailrace keys make), beside this one.")
    ] = ""
    tls: Annotated[bool, Meta(description="Mutual TLS everywhere; needed beyond loopback.")] = False
    insecure: Annotated[
        bool,
        Meta(
            description="Without TLS and keys, in a network of yours alone. With tls: that engines' ranks on "
            "several machines, which vLLM does not encrypt, have such a network."
        ),
    ] = False
    traces: Annotated[
        str, Meta(description="OTLP endpoint for spans; monitor: for tailrace trace; none: no spans.")
    ] = "monitor"
    schedulers: Annotated[int, Meta(ge=1, le=5, description="Schedulers on one machine; one leads.")] = 1
    kubernetes: Kubernetes = Kubernetes()
    environment: Annotated[
        dict[Annotated[str, Meta(pattern=_VARIABLE)], str],
        Meta(description="Environment of every process, such as HF_HOME or VLLM_..."),
    ] = {}

    @property
    def model(self) -> Model:
        """Return the model, or the first one."""
        return self.models[0]

    @property
    def users(self) -> list[tuple[str, str]]:
        """Return the addresses that users reach, with the fields that say them."""
        if self.http:
            return [("http", self.http)]
        return [(f"models[{number}].http", model.http) for number, model in enumerate(self.models)]

    def insecure_for(self, kind: str) -> bool:
        """Return whether services of this kind get --insecure: with TLS, it is about engines' ranks alone."""
        return self.insecure and (kind == "worker" or not self.tls)

    def pods_of(self, model: Model) -> Kubernetes:
        """Return what Kubernetes has to know about the pods of a model."""
        own = msgspec.structs.asdict(model.kubernetes)
        given = {name: value for name, value in own.items() if value is not None}
        return msgspec.structs.replace(self.kubernetes, **given)

    def objectives(self, model: Model | None = None) -> dict[str, float]:
        """Return the given objectives, of the fleet or of a model, times in seconds. Raise ParameterError."""
        given = self.slo if model is None or model.slo is None else model.slo
        return read_objectives({name: str(value) for name, value in given.items()})


_PLACED: Final = re.compile(r"(.*) - at (`key` in )?`\$(.*)`", re.DOTALL)
_UNKNOWN_FIELD: Final = re.compile("Object contains unknown field `(.*)`")
_NOT_ALLOWED: Final = re.compile("Invalid enum value (.*)")
# What msgspec says of a field that is a section, with what else it may be.
_SECTION_EXPECTED: Final = "Expected a mapping"
_TYPES_NAMED: Final = re.compile("`[a-z]+(?: \\| [a-z]+)*`")
_TYPES: Final = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "null": "nothing",
    "object": "a mapping",
    "str": "a text",
}
_ANY_VALUE: Final = {"bool", "float", "int", "str"}
_RULES: Final = {
    _NAME: "a name of 1 to 40 characters: a to z, 0 to 9, and - between them",
    _CPUS: "CPUs as Kubernetes has them, such as '4' or 500m",
    _BYTES: "bytes as Kubernetes has them, such as 32Gi or 500M",
    _CLASS: "a name of Kubernetes's: a to z, 0 to 9, and . and - between them",
    _RESOURCE: "a resource of Kubernetes's, such as nvidia.com/gpu",
    _REGISTRY: "a registry's address, such as registry.example/llm",
    _GATEWAY: "NAME or NAMESPACE/NAME",
    _VARIABLE: "a variable's name: A to Z, a to z, 0 to 9 and _, no digit first",
    _FLAG: "a flag's long name, such as max-model-len",
}
# Sections by their place, without numbers.
_ANY_HOST: Final = "hosts[...]"
_SECTIONS: Final[Mapping[str, type[Struct]]] = {
    "": Fleet,
    _ANY_HOST: Host,
    "kubernetes": Kubernetes,
    "models": Model,
    "models.kubernetes": ModelPods,
    "models.policy": Policy,
    "models.autoscale": Autoscale,
    "policy": Policy,
}


# What a section is known by.
_MAIN: Final[Mapping[type[Struct] | None, str]] = {
    Autoscale: "max",
    Host: "address",
    Model: "model",
    Policy: "name",
}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Fleet)}


def read_fleet(path: Path) -> Fleet:
    """Read a file. Raise FleetError, whose message names the file and the field."""
    try:
        content: object = None
        content = _load(read_regular(path, _FILE_BYTES))
        # An empty file is one without fields.
        content = {} if content is None else content
        fleet = msgspec.convert(content, Fleet)
        _check(fleet)
    except OSError as error:
        raise FleetError(f"{path}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise FleetError(f"{path}: {_plain(str(error), content)}") from error
    except RecursionError as error:
        raise FleetError(f"{path}: nested too deeply") from error
    except yaml.YAMLError as error:
        raise FleetError(f"{path}: {yaml_problem(error)}") from error
    except ValueError as error:
        raise FleetError(f"{path}: {' '.join(str(error).split())}") from error
    return fleet


def to_yaml(fleet: Fleet) -> str:
    """Return the file of a fleet, without what is at its default."""
    text: str = yaml.safe_dump(msgspec.to_builtins(fleet), sort_keys=False)
    return text


def _load(text: bytes) -> object:
    """Return the content of YAML. Raise YAMLError or ValueError."""
    try:
        return yaml.load(text, _Loader)
    except (AttributeError, IndexError, KeyError) as error:
        # What PyYAML does with `!!bool x`.
        raise FleetError("a value is not of the type that its tag (!!...) says") from error


class _Loader(yaml.SafeLoader):
    """Refuse a key that is there twice, of which YAML's readers silently take the last, and characters that
    cannot be written."""

    def __init__(self, stream: bytes) -> None:
        """Read the text."""
        super().__init__(stream)
        self._flattened: set[yaml.Node] = set()

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Return the text. Raise ConstructorError."""
        text = super().construct_scalar(node)
        if isinstance(text, str) and _UNWRITABLE.search(text):
            problem = "a character that no process can get"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return text

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Take over the fields of merged mappings (<<). Raise ConstructorError."""
        # Afterwards it has a field twice that it has in place of a merged one.
        if node not in self._flattened:
            self._flattened.add(node)
            names = [
                "<<" if key.tag == _MERGE else self.construct_object(key, deep=True) for key, _ in node.value
            ]
            for text, count in Counter(map(repr, names)).items():
                if count > 1:
                    problem = f"{text[:100]} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        super().flatten_mapping(node)


def _plain(problem: str, content: object) -> str:
    """Return msgspec's message with the field first, and in the file's words: `models[0].replicas: ...`."""
    said = _PLACED.fullmatch(problem)
    what, of_key, path = said.groups() if said else (problem, None, "")
    path = path.removeprefix(".")
    place, found = _place(path, content, problem)
    key = shown(_faulty(content, found, problem)) if of_key else ""
    kind = re.sub(r"\[\d+\]", "", path)
    section = _SECTIONS.get(kind)
    if match := _UNKNOWN_FIELD.fullmatch(what):
        meant = did_you_mean(match[1], section.__struct_fields__) if section is not None else ""
        what = f"unknown field {shown(match[1])}{meant}"
    elif match := _NOT_ALLOWED.fullmatch(what):
        parent, _, field = kind.rpartition(".")
        what = f"{match[1][:100]} is none of {', '.join(_allowed(get_type_hints(_SECTIONS[parent])[field]))}"
    else:
        what = what.replace("Object missing", "missing")
        what = _TYPES_NAMED.sub(lambda named: _typed(named[0]), what)
        for pattern, rule in _RULES.items():
            what = what.replace(f"a text matching regex {pattern!r}", rule)
        value = _value(content, found)
        if what.startswith(_SECTION_EXPECTED) and section in _MAIN and isinstance(value, (int, str)):
            what += f" (write {{{_MAIN[section]}: {str(value)[:100]}}})"
    return printable(": ".join(filter(None, [place, key, what])))


def _typed(named: str) -> str:
    """Return types as a reader of YAML knows them."""
    types = named.strip("`").split(" | ")
    if {*types} >= _ANY_VALUE:
        return "a value" if "array" in types else "a single value"
    return " or ".join(_TYPES.get(each, each) for each in types)


def _allowed(kind: Any) -> list[str]:
    """Return the words that a type allows."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [str(each.value) for each in kind]
    if get_origin(kind) is Literal:
        return [str(each) or "''" for each in get_args(kind)]
    return [word for each in get_args(kind) for word in _allowed(each)]


def _place(path: str, content: object, problem: str) -> tuple[str, list[Any]]:
    """Return a place of msgspec's, and the keys and numbers that lead there.

    msgspec writes [...] for the key of a mapping: it is the one with which the problem is the same.
    """
    place, found = "", list[Any]()
    for step in re.findall(r"[^.\[\]]+|\.\.\.", path):
        if step.isdecimal():
            place += f"[{step}]"
            found.append(int(step))
            continue
        name = _faulty(content, found, problem) if step == "..." else step
        plain = re.fullmatch(r"[A-Za-z0-9_-]+", str(name))
        place += f".{name}" if plain else f"[{shown(name)}]"
        found.append(name)
    return place.removeprefix("."), found


def _faulty(content: object, found: list[Any], problem: str) -> object:
    """Return the key of the mapping at a place that has the problem; None: there is none."""
    mapping = _value(content, found)
    for key, value in mapping.items() if isinstance(mapping, dict) else ():
        try:
            msgspec.convert(_replaced(content, found, {key: value}), Fleet)
        except msgspec.ValidationError as error:
            if str(error) == problem:
                return key
    return None


def _value(content: Any, found: list[Any]) -> Any:
    """Return the value at a place; None: there is none."""
    for step in found:
        if isinstance(content, list) and isinstance(step, int):
            content = content[step]
        else:
            content = content.get(step) if isinstance(content, dict) else None
    return content


def _replaced(content: Any, found: list[Any], value: object) -> object:
    """Return the content with another value at a place."""
    if not found:
        return value
    copy = content.copy()
    copy[found[0]] = _replaced(content[found[0]], found[1:], value)
    return copy


def _check(fleet: Fleet) -> None:
    """Raise FleetError if fields do not go together."""
    hosts = fleet.hosts
    for field, names in (
        ("control", fleet.control),
        ("edges", fleet.edges),
        *((f"models[{at}].replicas", _names(each.replicas)) for at, each in enumerate(fleet.models)),
        *((f"models[{at}].frontends", _names(each.frontends)) for at, each in enumerate(fleet.models)),
        ("etcd", [name for name in fleet.etcd if ":" not in name]),
    ):
        for name in names:
            if name not in hosts:
                known = ", ".join(hosts) or "the file has none: it describes one machine"
                raise FleetError(f"{field}: {shown(name)} is none of the hosts ({known})")
        if len(set(names)) < len(names):
            raise FleetError(f"{field}: a host is there twice")
    own_etcd = fleet.kubernetes.etcd if isinstance(fleet.kubernetes.etcd, list) else []
    if fleet.kubernetes.etcd == []:
        raise FleetError("kubernetes.etcd: at least one HOST:PORT, or a number of members")
    for field, address in (
        *fleet.users,
        *(("etcd", each) for each in fleet.etcd if ":" in each),
        *(("kubernetes.etcd", each) for each in own_etcd),
    ):
        try:
            parse_address(address)
        except MalformedAddress as error:
            hint = f": {error}" if str(error) else " is not HOST:PORT"
            raise FleetError(f"{field}: {shown(address)}{hint}") from error
    for address in own_etcd:
        if _only_here(parse_address(address)[0].lower()):
            raise FleetError(f"kubernetes.etcd: {address} is each pod itself: name what pods reach etcd by")
    for at, each in enumerate(fleet.models):
        if not each.model.strip() or each.model.startswith("-"):
            raise FleetError(f"models[{at}].model: {shown(each.model)} is neither a folder nor a name")
        _check_flags(f"models[{at}]", each)
        _check_replicas(fleet, at, each)
    _check_models(fleet)
    if fleet.traces not in ("monitor", "none") and not re.match(_URL, fleet.traces):
        raise FleetError(f"traces: {shown(fleet.traces)} is not monitor, none or http://HOST:PORT")
    prometheus = fleet.kubernetes.prometheus
    if not re.match(_URL, prometheus):
        raise FleetError(f"kubernetes.prometheus: {shown(prometheus)} is not http://HOST:PORT")
    for _, address in fleet.users:
        open_to_all = exposed([address]) and not (fleet.keys or fleet.insecure_for("frontend"))
        if open_to_all and (fleet.http or not _asks_users(fleet)):
            raise FleetError(f"keys: users on other machines reach {address}: name a file of keys")
    if hosts:
        _check_hosts(fleet)
    elif fleet.etcd:
        raise FleetError("etcd: without hosts, tailrace up starts one of its own")
    if len({":" in name for name in fleet.etcd}) > 1:
        raise FleetError("etcd: names of hosts and addresses do not go together")
    _check_policy(fleet)


def _asks_users(fleet: Fleet) -> bool:
    """Return whether vLLM's own API server asks users for a key or a certificate."""
    flags = {name.lstrip("-").replace("_", "-"): value for name, value in fleet.model.flags.items()}
    has_key = "api-key" in flags or fleet.environment.get("VLLM_API_KEY")
    return bool(has_key) or str(flags.get("ssl-cert-reqs")) == "2"


def _check_models(fleet: Fleet) -> None:
    for at, each in enumerate(fleet.models):
        if each.front is Front.BOTH and fleet.hosts:
            raise FleetError(f"models[{at}].front: both: on one machine only; python, or rust")
    if len(fleet.models) > 1 and not fleet.http:
        raise FleetError("http: several models need HOST:PORT of one address for all")
    for at, each in enumerate(fleet.models):
        if each.has_cluster and not fleet.http:
            field = f"models[{at}].{'slo' if each.policy is None else 'policy'}"
            raise FleetError(
                f"{field}: needs http, an edge: without, policy and slo of the file are the model's"
            )
    if not fleet.http:
        if fleet.keys and fleet.model.front is Front.RUST:
            raise FleetError(
                "models[0].front: with keys, vllm-rs needs an edge: give http, HOST:PORT for all"
            )
        if fleet.edges:
            raise FleetError("edges: they need http, HOST:PORT of the address for all models")
        return
    names: dict[str, int] = {}
    for at, each in enumerate(fleet.models):
        if each.http != Model(model="").http:
            raise FleetError(f"models[{at}].http: {fleet.http} is the address of all models")
        if tls := [name for name in each.flags if re.match(_HTTPS, name)]:
            raise FleetError(f"models[{at}].flags: {tls[0]}: users reach the edge, not the front ends")
        first = names.setdefault(each.served_name, at)
        if first != at:
            raise FleetError(
                f"models[{at}]: users know it as {shown(each.served_name)}, and models[{first}] too: "
                "flags.served-model-name says another name"
            )


def _check_replicas(fleet: Fleet, at: int, model: Model) -> None:
    field, scale = f"models[{at}]", model.autoscale
    if scale is None:
        if model.replicas == 0:
            raise FleetError(f"{field}.replicas: at least 1; none at the start needs autoscale")
        return
    try:
        bounds = scale.bounds
    except FleetError as error:
        raise FleetError(f"{field}.autoscale.{error}") from error
    if bounds.least > bounds.most:
        raise FleetError(f"{field}.autoscale: min {bounds.least} exceeds max {bounds.most}")
    if fleet.hosts:
        raise FleetError(
            f"{field}.autoscale: on several hosts nobody starts instances: one machine, or Kubernetes"
        )
    if model.number is None or not bounds.least <= model.number <= bounds.most:
        raise FleetError(f"{field}.replicas: a number from autoscale.min to autoscale.max")
    if any(other.model == model.model for other in fleet.models if other is not model):
        raise FleetError(
            f"{field}.autoscale: another model has the same `model`, and instances are told apart by what is "
            "in it: name a folder of another model, or leave autoscale out"
        )


def _check_flags(field: str, model: Model) -> None:
    for name, value in model.flags.items():
        flag = name.lstrip("-").replace("_", "-")
        if flag == "help":
            raise FleetError(f"{field}.flags: {name}: is not a flag of a cluster")
        if flag in _FIELDS:
            raise FleetError(f"{field}.flags: {name}: {field}.{_FIELDS[flag]} says it")
        names = value if isinstance(value, list) else [value]
        if flag == "served-model-name" and not (names and all(str(each).strip() for each in names)):
            raise FleetError(f"{field}.flags: {name}: a name is empty: give one, or leave the flag out")
    for name, value in model.flags.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise FleetError(f"{field}.flags: {name}: {error}") from error


def _only_here(address: str) -> bool:
    """Return whether an address means this machine on each machine."""
    if is_ip(address):
        return is_loopback(f"{address}:1") or ipaddress.ip_address(address).is_unspecified
    return address in ("localhost", "localhost.localdomain", "ip6-localhost")


def _check_hosts(fleet: Fleet) -> None:
    if not fleet.etcd:
        raise FleetError("etcd: name the hosts that run a member, or HOST:PORT of members of yours")
    addresses = [host.address for host in fleet.hosts.values()]
    for name, host in fleet.hosts.items():
        field = f"hosts.{name}.address: {shown(host.address)}"
        if host.address.count(":") == 1:
            raise FleetError(f"{field}: without a port, please")
        if not re.match(_ADDRESS, host.address) or (":" in host.address and not is_ip(host.address)):
            raise FleetError(f"{field} is neither a name nor an address (IPv6 without brackets)")
        if not_ipv4(host.address):
            raise FleetError(f"{field} is no IPv4 address")
        if len(addresses) > 1 and _only_here(host.address.lower()):
            raise FleetError(f"{field}: the other hosts do not reach it by that")
        if addresses.count(host.address) > 1:
            raise FleetError(f"hosts.{name}.address: {host.address} is there twice")
    if not (fleet.tls or fleet.insecure):
        raise FleetError("tls: several hosts need tls: true (or insecure: true in a network of yours alone)")
    if fleet.schedulers > 1:
        raise FleetError("schedulers: control names the hosts, which have one each")


def _check_policy(fleet: Fleet) -> None:
    for place, model in [("", None), *((f"models[{at}].", each) for at, each in enumerate(fleet.models))]:
        policy = (model and model.policy) or fleet.policy
        try:
            load(policy.name, parameters=policy.texts)
        except ParameterError as error:
            raise FleetError(f"{place}policy.parameters: {error}") from error
        except (UnknownPolicyError, UnusablePolicyError) as error:
            raise FleetError(f"{place}policy.name: {error}") from error
        try:
            fleet.objectives(model)
        except ParameterError as error:
            raise FleetError(f"{place}slo: {error}") from error


def _names(by_host: int | Mapping[str, int] | None) -> list[str]:
    return list(by_host) if isinstance(by_host, Mapping) else []
