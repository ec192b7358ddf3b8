"""What `tailrace up` was asked for."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tailrace.tiny import MODEL_PATH


class Engine(enum.StrEnum):
    """What a worker runs."""

    VLLM = "vllm"
    SIMULATED = "simulated"


class Front(enum.StrEnum):
    """Which of vLLM's API servers serves HTTP."""

    PYTHON = "python"
    RUST = "rust"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """A local cluster. `model` is a folder or a name that vLLM knows, `served_name` what clients say."""

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
    # Those of the policy that are not at their defaults.
    policy_parameters: Mapping[str, str]
    # Cores and GPUs (ids) that the workers share.
    cores: int
    gpus: tuple[str, ...]
    # The workers' length predictor; None: each worker's default. Empty: none.
    predictor: str | None = None
    # Devices of each worker's engine: those that share a layer, times stages.
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    # Measure the engines before they join, one of each kind.
    profile: bool = False
    # Further options of `tailrace serve worker`.
    worker_arguments: tuple[str, ...]
    # Flags of `vllm serve` for the API server of each front end.
    frontend_arguments: tuple[str, ...] = ()
    # Seconds for which the front ends keep answers; 0: they keep none.
    keep_answers_s: float = 0.0
    # Where spans go; None: nowhere. MONITOR_TRACES: to the cluster's own monitor.
    traces: str | None
    # With certificates, made for this cluster.
    tls: bool = False

    @property
    def ranks(self) -> int:
        """Devices of each worker."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def serves_tiny_model(self) -> bool:
        """Whether the model is the one that Tailrace ships."""
        return Path(self.model).resolve() == MODEL_PATH


MONITOR_TRACES = "monitor"
