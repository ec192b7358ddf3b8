"""The two servers of a run: the fleet, and plain `vllm serve` with the same model and engine settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tailrace.tiny import MODEL_PATH, REASONING_PARSER
from tests.clients.scripted import make_scripted_model
from tests.harness.fleet import MODEL, Fleet
from tests.harness.servers import ServeProcess

WORKERS: Final = ("w0", "w1", "w2")
BLOCK_TOKENS: Final = 32
KV_BLOCKS: Final = 2048
_TOOLS: Final = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def make_model(name: str, folder: Path) -> tuple[Path, Sequence[str]]:
    """Return the path of a model, and the flags for its API server."""
    if name == "tiny":
        return MODEL_PATH, (*_TOOLS, "--reasoning-parser", REASONING_PARSER)
    # Its answers have no thought.
    return make_scripted_model(folder / "scripted"), (*_TOOLS, "--reasoning-parser=")


@contextmanager
def run_fleet(folder: Path, model: Path, flags: Sequence[str]) -> Iterator[Fleet]:
    """Run a fleet of three workers for the block. `flags`: further ones of the API server."""
    fleet = Fleet(folder, "vllm")
    # As plain `vllm serve`, with which it is compared.
    fleet.niceness = 0
    try:
        fleet.start_control()
        for name in WORKERS:
            options = ["--kv-blocks", str(KV_BLOCKS), "--block-size", str(BLOCK_TOKENS)]
            fleet.start_worker(name, options, wait=False, model=str(model))
        fleet.start_frontend(options=flags, model=str(model))
        fleet.wait_instances(WORKERS)
        yield fleet
    finally:
        fleet.close()


def plain_server(model: Path, flags: Sequence[str]) -> ServeProcess:
    """Start plain `vllm serve`."""
    options = ["--served-model-name", MODEL, "--enforce-eager", "--dtype", "float32", *flags]
    options += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(KV_BLOCKS)]
    options += ["--distributed-executor-backend", "uni", "--no-async-scheduling"]
    options += ["--uvicorn-log-level", "warning"]
    environment = {
        # Without this vLLM replaces `uni` by `mp`, which spins on shared memory on two cores.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return ServeProcess("vllm serve", model, options, environment)
