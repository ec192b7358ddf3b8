"""The options of `tailrace up`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tailrace.tiny import MODEL_PATH


class Engine(enum.StrEnum):
    """The engine of the workers."""

    VLLM = "vllm"
    SIMULATED = "simulated"


class Front(enum.StrEnum):
    """The API server of the front ends: vLLM's Python or Rust one."""

    PYTHON = "python"
    RUST = "rust"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The options of a local cluster. `model`: a folder or a name that vLLM knows; `served_name`: the model
    name that clients use."""

    workers: int
    engine: Engine
    front: Front
    host: str
    port: int
    schedulers: int
    frontends: int
    model: str
    served_name: str
    reasoning_parser: str | None
    # None: the scheduler's own default.
    policy: str | None
    # The policy's parameters that differ from their defaults.
    policy_parameters: Mapping[str, str]
    # Number of cores, and ids of GPUs, that the workers share.
    cores: int
    gpus: tuple[str, ...]
    # The workers' length predictor; None: each worker's default. Empty: none.
    predictor: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    # Whether to profile one engine of each kind before it joins.
    profile: bool = False
    # Further options of `tailrace serve worker`.
    worker_arguments: tuple[str, ...]
    # Flags of `vllm serve` for the API server of each front end.
    frontend_arguments: tuple[str, ...] = ()
    # Seconds for which the front ends keep answers; 0: disabled.
    keep_answers_s: float = 0.0
    # OTLP endpoint for spans; None: disabled. MONITOR_TRACES: the cluster's own monitor.
    traces: str | None
    # Whether to use TLS with certificates issued for this cluster.
    tls: bool = False

    @property
    def ranks(self) -> int:
        """Return the number of devices of each worker."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def serves_tiny_model(self) -> bool:
        """Return whether the model is the one shipped with Tailrace."""
        return Path(self.model).resolve() == MODEL_PATH


MONITOR_TRACES = "monitor"
