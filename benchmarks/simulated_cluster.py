"""Options of `tailrace up --engine simulated`, for benchmarks that start a cluster themselves."""

from __future__ import annotations

from tailrace.local.options import ClusterOptions, Engine, Front
from tailrace.local.ports import LOOPBACK, free_ports
from tailrace.tiny import MODEL_PATH, REASONING_PARSER


def simulated_options(workers: int) -> ClusterOptions:
    """Return options without TLS, with vLLM's Rust API server; two schedulers, since a standby forwards
    calls."""
    return ClusterOptions(
        workers=workers,
        engine=Engine.SIMULATED,
        front=Front.RUST,
        host=LOOPBACK,
        port=free_ports(1)[0],
        schedulers=2,
        frontends=1,
        model=str(MODEL_PATH),
        served_name="tiny",
        reasoning_parser=REASONING_PARSER,
        policy=None,
        policy_parameters={},
        cores=2,
        gpus=(),
        worker_arguments=(),
        traces="monitor",
        tls=False,
    )
