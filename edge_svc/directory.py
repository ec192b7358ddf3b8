"""Which models the fleet serves, under which names, and which front ends serve them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

import msgspec

from edge_svc.configuration import Endpoints
from tailrace.records import AdapterRecord, ServiceRecord

# What vllm-rs answers with 404 or 400 (docs/api-servers.md).
_SEVERAL: Final = re.compile(rb'\s*\[\s*["\[]')
_ONE: Final = frozenset({b"", b"1", b"null"})
TOKENIZING: Final = frozenset({"/tokenize", "/detokenize"})
"""Paths that no engine answers."""
RUST_PATHS: Final = TOKENIZING | {"/v1/chat/completions", "/v1/completions"}
"""Paths that vllm-rs answers."""
# Names that are remembered after their front ends have gone.
_GONE_MAX: Final = 1_000


class Asked(msgspec.Struct):
    """What a body says about who can answer it."""

    model: str | None = None
    # Whether it is what it should be, front ends say.
    n: msgspec.Raw = msgspec.Raw(b"")
    # Names that a client may give.
    request_id: msgspec.Raw = msgspec.Raw(b"")
    session_id: msgspec.Raw = msgspec.Raw(b"")
    # A text, its tokens, or a list of these.
    prompt: msgspec.Raw = msgspec.Raw(b"")


@dataclass(frozen=True, slots=True)
class Served:
    """A name that users send: of a model, or of an adapter."""

    name: str
    # Public name of its model; the same for a model's first name.
    model: str
    # --model of its front ends.
    root: str
    # Whose API servers are vLLM's Rust one, and its Python one; empty: it has none.
    rust: str
    python: str

    def cluster(self, path: str, asked: Asked) -> str:
        """Return the cluster that answers: vllm-rs, which is the faster one, what it can."""
        if self.rust and (not self.python or _rust_can(path, asked)):
            return self.rust
        return self.python


@dataclass(frozen=True, slots=True)
class Directory:
    """All names, and the clusters behind them."""

    names: Mapping[str, Served]
    clusters: tuple[Endpoints, ...]
    # Names of models that were here before, and whose front ends are all away.
    gone: frozenset[str] = frozenset()
    # gRPC addresses of the front ends with vLLM's Rust API server, by cluster.
    rust: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def after(self, before: Directory) -> Directory:
        """Return this directory, which also knows what was there before it."""
        models = {served.model for served in self.names.values()}
        lost = {name for name, served in before.names.items() if served.model not in models}
        gone = sorted((before.gone | lost) - self.names.keys())
        return replace(self, gone=frozenset(gone[:_GONE_MAX]))

    def find(self, name: str | None) -> Served | None:
        """Return who serves a name, or the only model if none is given; None if nobody does."""
        if name:
            return self.names.get(name)
        models = {served.model for served in self.names.values()}
        return self.names[models.pop()] if len(models) == 1 else None


def directory(services: Iterable[ServiceRecord], adapters: Iterable[AdapterRecord]) -> Directory:
    """Return the directory of these front ends. Where two models have the same name, the first one has it."""
    by_model: dict[str, list[ServiceRecord]] = {}
    for service in sorted(services, key=lambda each: each.service_id):
        if service.kind == "frontend" and service.http_address and service.model_name:
            by_model.setdefault(service.model_name, []).append(service)
    names: dict[str, Served] = {}
    clusters: list[Endpoints] = []
    reporting: dict[str, frozenset[str]] = {}
    for model, front_ends in sorted(by_model.items()):
        rust = [each.http_address for each in front_ends if each.api_server == "rust"]
        python = [each.http_address for each in front_ends if each.api_server != "rust"]
        https = frozenset(each.http_address for each in front_ends if each.https)
        served = Served(
            model,
            model,
            front_ends[0].model,
            _cluster(model, "rust", rust),
            _cluster(model, "python", python),
        )
        clusters += [
            Endpoints(name, tuple(dict.fromkeys(addresses)), https.intersection(addresses))
            for name, addresses in ((served.rust, rust), (served.python, python))
            if name
        ]
        if served.rust:
            reporting[served.rust] = frozenset(
                each.address for each in front_ends if each.api_server == "rust"
            )
        names[model] = served
        for name in sorted({name for each in front_ends for name in each.names}):
            names.setdefault(name, replace(served, name=name))
    for adapter in sorted(adapters, key=lambda each: each.key):
        if (served_model := names.get(adapter.model)) is not None:
            names.setdefault(adapter.name, replace(served_model, name=adapter.name))
    return Directory(names, tuple(clusters), rust=reporting)


def merged(directories: Iterable[Directory]) -> Directory:
    """Return one directory. The first one that has a name keeps it, and a model with all its names."""
    names: dict[str, Served] = {}
    clusters: list[Endpoints] = []
    models: set[str] = set()
    reporting: dict[str, frozenset[str]] = {}
    for each in directories:
        own = [served for served in each.names.values() if served.model not in models]
        for served in own:
            names.setdefault(served.name, served)
        used = {name for served in own for name in (served.rust, served.python)}
        clusters += [endpoints for endpoints in each.clusters if endpoints.cluster in used]
        reporting |= {name: each.rust[name] for name in used & each.rust.keys()}
        models |= {served.model for served in own}
    return Directory(names, tuple(clusters), rust=reporting)


def _cluster(model: str, kind: str, addresses: list[str]) -> str:
    """Return a name that is fit for a file, which no two models share."""
    return f"{kind}-{blake2b(model.encode(), digest_size=16).hexdigest()}" if addresses else ""


def _rust_can(path: str, asked: Asked) -> bool:
    several = _SEVERAL.match(asked.prompt) is not None
    return path in RUST_PATHS and bytes(asked.n) in _ONE and not several
