"""A fleet on Kubernetes as a Helm chart: the same objects, in which some fields are values. Pure."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tailrace import __version__
from tailrace.fleet.kubernetes import SECRETS, Manifest, to_yaml

# Fields of a pod, and of its container, that are values of its kind; those that the object has not are empty.
_OF_POD: Final[Mapping[str, Any]] = {"nodeSelector": {}, "tolerations": []}
_OF_CONTAINER: Final[Mapping[str, Any]] = {"image": "", "args": [], "resources": {}}
# What a file's objects need, by the value that switches them; true: the fleet file asks for them.
_SWITCHES: Final = {"network.yaml": True, "monitoring.yaml": False, "scaling.yaml": True, "route.yaml": True}
_VALUE: Final = re.compile(r"'?\{\{\.Values\.([A-Za-z0-9.-]+)\|toJson\}\}'?")
# Of the values that have names of ours: resources and labels are Kubernetes' own.
_NAMED_DEPTH: Final = 2
_TYPES: Final = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}


def chart(objects: Mapping[str, Sequence[Manifest]]) -> dict[str, str]:
    """Return the files of a chart of objects by file. Secrets are no part of it: they stay beside it."""
    values: dict[str, Any] = {}
    templates = {}
    for name, documents in objects.items():
        if name not in (SECRETS, "namespace.yaml"):
            text = _template([_with_values(each, values) for each in documents])
            switch = name.removesuffix(".yaml")
            if name in _SWITCHES:
                values.setdefault(switch, {})["enabled"] = _SWITCHES[name]
                text = f"{{{{- if .Values.{switch}.enabled }}}}\n{text}{{{{- end }}}}\n"
            templates[f"templates/{name}"] = text
    about = {
        "apiVersion": "v2",
        "name": "tailrace",
        "description": "A fleet of vLLM instances under Tailrace (made by tailrace render helm).",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
    }
    return {
        "Chart.yaml": to_yaml([about]),
        "values.yaml": "# As fleet.yaml has them. Everything else is in the templates.\n" + to_yaml([values]),
        "values.schema.json": json.dumps(_schema(values), indent=1) + "\n",
        ".helmignore": f"{SECRETS}\n",
        **({SECRETS: to_yaml(objects[SECRETS])} if SECRETS in objects else {}),
        **templates,
    }


def _with_values(given: Manifest, values: dict[str, Any]) -> Manifest:
    """Return an object with references in place of what are values, which are added to `values`."""
    made = copy.deepcopy(given)
    if "namespace" in made["metadata"]:
        made["metadata"]["namespace"] = _Reference("{{.Release.Namespace}}")
    spec = made.get("spec", {})

    def take(place: Manifest, field: str, value: str, otherwise: Any = None) -> None:
        """Put a reference to a value into a field of the object."""
        *path, last = value.split(".")
        own = values
        for each in path:
            own = own.setdefault(each, {})
        own[last] = place.get(field, otherwise)
        place[field] = _Reference(f"{{{{.Values.{value}|toJson}}}}")

    match made["kind"]:
        case "Deployment" | "StatefulSet" | "LeaderWorkerSet":
            for template in _templates(spec):
                kind = template["spec"]["containers"][0]["name"]
                take(template["metadata"], "annotations", f"{kind}.annotations", {})
                take(template["spec"], "imagePullSecrets", "imagePullSecrets", [])
                for field, otherwise in _OF_POD.items():
                    take(template["spec"], field, f"{kind}.{field}", otherwise)
                for field, otherwise in _OF_CONTAINER.items():
                    take(template["spec"]["containers"][0], field, f"{kind}.{field}", otherwise)
            kind = made["metadata"]["name"]
            # etcd's members know each other by name.
            if "replicas" in spec and kind != "etcd":
                take(spec, "replicas", f"{kind}.replicas")
        case "Service" if "type" in spec:
            take(spec, "type", "service.type")
            take(made["metadata"], "annotations", "service.annotations", {})
        case "ScaledObject":
            # Of several models, each has its own.
            name = made["metadata"]["name"]
            place = "scaling" if name == "worker" else f"scaling.{name}"
            take(spec, "minReplicaCount", f"{place}.minReplicas")
            take(spec, "maxReplicaCount", f"{place}.maxReplicas")
        case "HTTPRoute":
            take(spec, "hostnames", "route.hostnames", [])
            take(spec, "parentRefs", "route.parentRefs")
    text: Manifest = _literal(made)
    return text


class _Reference(str):
    """What Helm replaces."""


def _templates(spec: Manifest) -> list[Manifest]:
    """Return the templates of a workload's pods."""
    group = spec.get("leaderWorkerTemplate")
    return [spec["template"]] if group is None else [group["leaderTemplate"], group["workerTemplate"]]


def _literal(value: Any) -> Any:
    """Return the value with what Helm would otherwise replace in its texts, such as a chat template's."""
    match value:
        case _Reference():
            return str(value)
        case str():
            return value.replace("{{", "{{`{{`}}")
        case dict():
            return {key: _literal(each) for key, each in value.items()}
        case list():
            return [_literal(each) for each in value]
        case _:
            return value


def _template(documents: Sequence[Manifest]) -> str:
    # JSON is YAML, but not in quotes.
    return _VALUE.sub(lambda found: f"{{{{ {_path(found[1].split('.'))} | toJson }}}}", to_yaml(documents))


def _path(names: Sequence[str]) -> str:
    """Return the expression of a value: with a dash in one of its names, the dots are not enough."""
    if all(name.isidentifier() for name in names):
        return f".Values.{'.'.join(names)}"
    return f"index .Values {' '.join(json.dumps(name) for name in names)}"


def _schema(value: Any, depth: int = 0) -> dict[str, Any]:
    """Return the JSON Schema of values: a name that is none of theirs is an error."""
    if isinstance(value, dict) and depth < _NAMED_DEPTH:
        fields = {name: _schema(each, depth + 1) for name, each in value.items()}
        # Helm adds its own at the top.
        fields |= {"global": {}} if depth == 0 else {}
        return {"type": "object", "additionalProperties": False, "properties": fields}
    return {"type": _TYPES[type(value)]} | ({"minimum": 0} if type(value) is int else {})
