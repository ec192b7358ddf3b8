"""Fleet files for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from tailrace.cli.fleet_file import FleetFile, options_of, read_fleet_file
from tailrace.cli.up import up
from tailrace.local.options import ClusterOptions

MODEL = {
    "model": "org/model",
    "flags": {"max-model-len": 32768, "enable-lora": True, "lora-modules": ["a=/x", "b=/y"]},
}
TWO_HOSTS = {
    "hosts": {"a": {"address": "10.0.0.1", "gpus": 4}, "b": {"address": "b.example", "gpus": 2}},
    "etcd": ["a"],
    "control": ["a", "b"],
    "models": [{**MODEL, "http": "0.0.0.0:8000"}],
    "keys": "keys.json",
    "tls": True,
}
# Two models behind an edge on each host; the second model's front ends are on one of them.
BEHIND_EDGES = {
    **TWO_HOSTS,
    "models": [
        {
            "model": "org/chat",
            "replicas": 2,
            "flags": {"served-model-name": "chat", "tensor-parallel-size": 2},
        },
        {"model": "org/coder", "flags": {"served-model-name": "coder"}, "frontends": {"b": 2}},
    ],
    "http": "0.0.0.0:8000",
    "edges": ["a", "b"],
}
ONE_MACHINE = {"models": [MODEL]}
# For Kubernetes.
PODS = {
    "models": [{**MODEL, "replicas": 4, "frontends": 2, "http": "0.0.0.0:8000"}],
    "keys": "keys.json",
    "tls": True,
    "schedulers": 2,
}


def write(folder: Path, content: Any) -> Path:
    """Write a file and return its path."""
    path = folder / "fleet.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def changed(content: Any, place: str, value: Any) -> Any:
    """Return the content with the value at a place such as `models.0.http`; None removes it."""
    head, _, rest = place.partition(".")
    key: Any = int(head) if head.isdigit() else head
    copy = list(content) if isinstance(content, list) else dict(content)
    if rest:
        copy[key] = changed(copy.get(key, {}) if isinstance(copy, dict) else copy[key], rest, value)
    elif value is None:
        del copy[key]
    else:
        copy[key] = value
    return copy


def read(
    folder: Path, content: Any, options: Callable[[FleetFile], ClusterOptions] = options_of
) -> tuple[FleetFile, ClusterOptions]:
    """Return a file and the options that follow from it."""
    file = read_fleet_file(write(folder, content))
    with click.Context(up):
        return file, options(file)


def leaves(content: Any, place: str = "") -> Iterator[str]:
    """Yield the places of all values that are not containers."""
    pairs = enumerate(content) if isinstance(content, list) else content.items()
    for key, value in pairs:
        if isinstance(value, (dict, list)):
            yield from leaves(value, f"{place}{key}.")
        else:
            yield f"{place}{key}"
