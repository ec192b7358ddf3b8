"""The options of `tailrace up`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tailrace.local.ports import LOOPBACK
from tailrace.numeric import WholeRange
from tailrace.service.settings import OneOf, setting
from tailrace.service.vllm_line import NO_LINE, VllmLine
from tailrace.tiny import MODEL_PATH

TINY_NAME = "tiny"
"""Model name of the shipped model."""


DEFAULT_CLUSTER = "default"
"""The services' default name of their cluster."""


class Engine(enum.StrEnum):
    """The engine of the workers."""

    VLLM = "vllm"
    SIMULATED = "simulated"


LOCAL_WORKERS_MAX: Final = 500
"""Most workers of one machine."""


class Front(enum.StrEnum):
    """The API servers of the front ends: vLLM's Python app, its Rust one, or both behind an edge, where the
    Python app is started when a request needs it."""

    # Both on one machine that can run them, unless something is asked for that only the Python app has; on
    # several machines python.
    AUTO = "auto"
    BOTH = "both"
    PYTHON = "python"
    RUST = "rust"


@dataclass(frozen=True, slots=True)
class OwnCluster:
    """The cluster of one model, beside that of all others, with its policy and objectives."""

    name: str
    policy: str
    policy_parameters: Mapping[str, str]
    # By name; times in seconds.
    objectives: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Between which numbers the instances of a model follow their load, and how long fewer must be enough
    before one is stopped."""

    least: int
    most: int
    cooldown_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """A local cluster. Fields without a flag follow from the machine, or from other fields."""

    # With bounds: at the start.
    workers: int = 1
    # None: their number is fixed.
    bounds: Bounds | None = None
    engine: Engine = setting(Engine.VLLM, "Engine of the instances.", type=OneOf(Engine))
    policy: str = setting(
        "tailrace",
        "Active policy (tailrace get policies); least_loaded moves requests only when told to.",
        metavar="NAME",
    )
    # The policy's parameters that differ from their defaults.
    policy_parameters: Mapping[str, str] = field(default_factory=dict)
    front: Front = setting(
        Front.AUTO,
        "vLLM's API server: its Python app, vllm-rs, or both, behind an edge: the Python app starts when a "
        "request needs it; auto: both where they can run.",
        type=OneOf(Front),
    )
    host: str = setting(
        LOOPBACK, "HTTP address; beyond loopback it requires API keys (or --insecure).", metavar="HOST"
    )
    port: int = setting(8000, "HTTP port.", type=WholeRange(1, 65535))
    schedulers: int = setting(1, "One leads.", type=WholeRange(1, 5))
    frontends: int = setting(1, "They share the port.", type=WholeRange(1, 32))
    # A folder, or a name that vLLM knows.
    model: str = setting(
        "", "The same as MODEL: a folder or name.  [default: the tiny reasoning model]", metavar="PATH"
    )
    # The rest of a `vllm serve` line, for workers and front ends.
    line: VllmLine = NO_LINE
    tls: bool = setting(False, "Create certificates, and use mutual TLS everywhere.", is_flag=True)
    # Options of `tailrace serve worker` and `tailrace serve frontend`.
    worker_arguments: tuple[str, ...] = ()
    frontend_arguments: tuple[str, ...] = ()
    # OTLP endpoint for spans; None: disabled. MONITOR_TRACES: the cluster's own monitor.
    traces: str | None = None
    # Whether it has a console.
    console: bool = False
    # Its name in etcd.
    cluster: str = DEFAULT_CLUSTER
    # Environment of every part.
    environment: Mapping[str, str] = field(default_factory=dict)
    # Number of cores (0: not known here), and ids of GPUs, that the workers share.
    cores: int = 0
    gpus: tuple[str, ...] = ()
    # Devices of each worker.
    ranks: int = 1
    # HOST:PORT of an edge, and its options; empty: users reach the front ends themselves.
    edge: str = ""
    edge_arguments: tuple[str, ...] = ()
    # Further models: of theirs only what concerns workers and front ends counts.
    others: tuple[ClusterOptions, ...] = ()
    # What the names of its processes begin with, where there are several models.
    prefix: str = ""
    # Of a model that is not in the fleet's cluster.
    own: OwnCluster | None = None
    # How many workers of other models have their places before its own, and all models' workers together.
    earlier_workers: int = 0
    all_workers: int = 0

    @property
    def models(self) -> tuple[ClusterOptions, ...]:
        """Return the options of each model."""
        return (self, *self.others)

    @property
    def sharing(self) -> int:
        """Return how many workers share this machine."""
        return max(1, self.all_workers or self.workers)

    @property
    def scheme(self) -> str:
        """Return how users speak to the API server, which has vLLM's own TLS."""
        return "https" if "ssl_certfile" in self.line.flags else "http"

    @property
    def served_name(self) -> str:
        """Return the model name that clients use."""
        named = self.line.flags.get("served_model_name")
        return named[0] if named else TINY_NAME if self.serves_tiny_model else self.model

    @property
    def served_names(self) -> list[str]:
        """Return all names that clients use."""
        return [*self.line.flags.get("served_model_name", ())] or [self.served_name]

    @property
    def serves_tiny_model(self) -> bool:
        """Return whether the model is the one shipped with Tailrace."""
        return Path(self.model).resolve() == MODEL_PATH


MONITOR_TRACES = "monitor"
