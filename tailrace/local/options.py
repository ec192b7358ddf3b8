"""The options of `tailrace up`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tailrace.local.ports import LOOPBACK
from tailrace.numeric import WholeRange
from tailrace.service.options import KEPT_ANSWERS
from tailrace.service.settings import OneOf, setting
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
    """A local cluster. Fields without a flag follow from the machine, or from other fields."""

    workers: int = setting(3, "Number of workers.", type=WholeRange(1, 500))
    engine: Engine = setting(Engine.VLLM, "Engine of the instances.", type=OneOf(Engine))
    # None: the scheduler's own default.
    policy: str | None = setting(None, "Active policy (tailrace get policies).", metavar="NAME")
    # The policy's parameters that differ from their defaults.
    policy_parameters: Mapping[str, str] = field(default_factory=dict)
    front: Front = setting(Front.PYTHON, "vLLM's API server: its Python app or vllm-rs.", type=OneOf(Front))
    host: str = LOOPBACK
    port: int = setting(8000, "HTTP port.", type=WholeRange(1, 65535))
    schedulers: int = setting(1, "One leads.", type=WholeRange(1, 5))
    frontends: int = setting(1, "They share the port.", type=WholeRange(1, 32))
    keep_answers_s: float = setting(
        0.0,
        "How long answers are kept for clients that reconnect; at least 5 s; 0: off (--front python only).",
        "--keep-answers",
        type=KEPT_ANSWERS,
        metavar="SECONDS",
    )
    # A folder, or a name that vLLM knows.
    model: str = setting("", "Model folder or name.  [default: the tiny reasoning model]", metavar="PATH")
    # By which clients know it.
    served_name: str = setting(
        "", "Model name that clients use.  [default: --model]", "--served-model-name", metavar="NAME"
    )
    reasoning_parser: str | None = setting(None, "vLLM's reasoning parser for the model.", metavar="NAME")
    frontend_arguments: tuple[str, ...] = setting(
        (),
        "A flag of `vllm serve` for the API server, such as --frontend-arg=--tool-call-parser=hermes; can "
        "be repeated. `ps` shows it: pass an API key as VLLM_API_KEY instead.",
        "--frontend-arg",
        multiple=True,
        metavar="FLAG[=VALUE]",
    )
    tensor_parallel_size: int = setting(
        1, "Devices per worker that split each layer (vLLM only).", type=WholeRange(1)
    )
    pipeline_parallel_size: int = setting(
        1, "Stages of layers per worker, each on its own devices (vLLM only).", type=WholeRange(1)
    )
    # None: each worker's default.
    predictor: str | None = setting(
        None, "Length predictor of the model (vLLM only); '' for none.", metavar="PATH"
    )
    profile: bool = setting(
        False, "Profile the engine first, for the policies (about a minute).", is_flag=True
    )
    tls: bool = setting(False, "Create certificates, and use mutual TLS everywhere.", is_flag=True)
    # Further options of `tailrace serve worker`.
    worker_arguments: tuple[str, ...] = ()
    # OTLP endpoint for spans; None: disabled. MONITOR_TRACES: the cluster's own monitor.
    traces: str | None = None
    # Number of cores, and ids of GPUs, that the workers share.
    cores: int = 1
    gpus: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Return the number of devices of each worker."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def serves_tiny_model(self) -> bool:
        """Return whether the model is the one shipped with Tailrace."""
        return Path(self.model).resolve() == MODEL_PATH


MONITOR_TRACES = "monitor"
