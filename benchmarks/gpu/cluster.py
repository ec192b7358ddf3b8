"""Servers for the parts: a Tailrace cluster and plain `vllm serve`, both with dummy weights."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.setting import Setting
from tests.harness.servers import MODEL, ServeProcess, TailraceCluster


def tailrace_cluster(setting: Setting, model: Path, workers: int) -> TailraceCluster:
    """Start this many instances, on one GPU if there is one: `tailrace up` shares its memory among them."""
    arguments = ["--workers", str(workers), "--model", str(model), "--served-model-name", MODEL]
    arguments += ["--no-traces", *setting.worker_options, "--load-format", "dummy"]
    return TailraceCluster(f"tailrace, {workers} instances", arguments)


def plain_vllm(setting: Setting, model: Path) -> ServeProcess:
    """Start `vllm serve` with its defaults (on a CPU, with a small configuration)."""
    options = ["--served-model-name", MODEL, "--load-format", "dummy", *setting.serve_options]
    options += ["--uvicorn-log-level", "warning"]
    return ServeProcess("vllm serve", model, options, dict(setting.serve_environment))
