"""Measure the cost of swapping to host memory and back, per step of a real vLLM worker.

One engine has the tiny model on one CPU thread, the order `round_robin`, and KV for only some of its
requests. Each step is timed on the engine's own thread (CPU time, so that other processes do not count), with
the number of swapped blocks. Steps without swaps give the normal step time by least squares; the additional
time of other steps is the cost of swapping.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tailrace.tiny import MODEL_PATH
from tests.harness.report import print_json, save
from worker_agent.engine.base import Frames, StepColumns
from worker_agent.engine.vllm.core import EngineParts
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.engine.vllm.host_pool import SwapMetadata
from worker_agent.profiling.probes import Probes
from worker_agent.settings import EngineOptions

_KV_BLOCKS: Final = 220
_HOST_BYTES: Final = 256 << 20
_MAX_LEN: Final = 2_900
_TIMEOUT_S: Final = 300.0
# Prompt and output tokens; outputs of several quanta of 500.
_REQUESTS: Final = [(100 + 40 * n, 700 + 130 * (n % 9)) for n in range(18)]


@dataclass(frozen=True, slots=True)
class Step:
    """A step that only decoded; milliseconds are CPU time of the engine thread."""

    ms: float
    copy_ms: float
    decodes: int
    kv_tokens: int
    # Requests and blocks copied, in both directions.
    swaps: int
    blocks: int


@dataclass(frozen=True, slots=True)
class SwapCost:
    """Means over the steps with swaps, in milliseconds."""

    steps: int
    swapping_steps: int
    requests_per_swapping_step: float
    mib_per_swapping_step: float
    # A step without swaps with the same batch; additional time with swaps; the copies' share of that.
    step_ms: float
    extra_ms: float
    copy_ms: float
    # `extra_ms` as a cost per request, if the cost of bytes is as fitted to the copies.
    ms_per_request: float
    ms_per_mib: float


class _NullSink:
    """An EngineSink that ignores everything."""

    def on_step(self, columns: StepColumns) -> None:
        """Ignore it."""

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        """Ignore it."""

    def on_engine_dead(self, reason: str) -> None:
        """Ignore it: probes raise the error."""


class _StepTimer:
    """Times an engine's steps. Used only on the engine thread."""

    def __init__(self, parts: EngineParts) -> None:
        self.steps: list[Step] = []
        torch.set_num_threads(1)
        # Measure only requests: cache no evicted blocks.
        parts.core.block_pool.metrics_collector = None
        core = parts.core.core
        self._scheduler = core.scheduler
        self._step = core.step_fn
        self._connector = self._scheduler.connector
        self._build = self._connector.build_connector_meta
        self._metadata = SwapMetadata()
        self._tokens: list[int] = []
        self._copy_s = 0.0
        pool = parts.core.host_pool
        assert pool is not None
        self._save, self._load = pool.save, pool.load
        pool.save = self._timed_save  # type: ignore[method-assign]
        pool.load = self._timed_load  # type: ignore[method-assign]
        self._connector.build_connector_meta = self._build_metadata
        core.step_fn = self._timed_step

    def _build_metadata(self, output: object) -> object:
        metadata = self._build(output)
        self._metadata = metadata
        self._tokens = list(output.num_scheduled_tokens.values())  # type: ignore[attr-defined]
        return metadata

    def _timed_save(self, block_ids: Sequence[int], slots: Sequence[int], names: Sequence[bytes]) -> bool:
        started_s = time.thread_time()
        saved = self._save(block_ids, slots, names)
        self._copy_s += time.thread_time() - started_s
        return saved

    def _timed_load(
        self, slots: Sequence[int], block_ids: Sequence[int], names: Sequence[bytes]
    ) -> list[int]:
        started_s = time.thread_time()
        failed = self._load(slots, block_ids, names)
        self._copy_s += time.thread_time() - started_s
        return failed

    def _timed_step(self) -> object:
        self._metadata, self._tokens, self._copy_s = SwapMetadata(), [], 0.0
        started_s = time.thread_time()
        result = self._step()
        ms = 1e3 * (time.thread_time() - started_s)
        swaps = [*self._metadata.swap_outs, *self._metadata.swap_ins]
        if self._tokens and max(self._tokens) == 1:
            kv_tokens = sum(request.num_computed_tokens for request in self._scheduler.running)
            blocks = sum(len(swap.slots) for swap in swaps)
            self.steps.append(Step(ms, 1e3 * self._copy_s, len(self._tokens), kv_tokens, len(swaps), blocks))
        return result


async def measure() -> tuple[SwapCost, int]:
    """Run the engine; return the cost, and the bytes of a block."""
    settings = EngineOptions(
        model=str(MODEL_PATH),
        kv_blocks=_KV_BLOCKS,
        host_kv_bytes=_HOST_BYTES,
        arguments={"dtype": "float32", "max_num_seqs": 64, "max_model_len": _MAX_LEN},
    )
    engine = VllmEngine(settings)
    probes = Probes(_NullSink(), time.monotonic)
    info = await engine.start(probes)
    try:
        timer = await engine._run(_StepTimer)
        engine.set_intra("round_robin")
        probes.begin()
        for prompt_tokens, output_tokens in _REQUESTS:
            probes.submit(engine, prompt_tokens, output_tokens)
        async with asyncio.timeout(_TIMEOUT_S):
            await probes.ended(len(_REQUESTS))
    finally:
        await engine.stop()
    return cost_of(timer.steps, info.kv_shape.block_bytes), info.kv_shape.block_bytes


def cost_of(steps: list[Step], block_bytes: int) -> SwapCost:
    """Compute the cost from the steps; some of them must have swapped."""
    decodes = np.array([[1.0, step.decodes, step.kv_tokens] for step in steps])
    ms = np.array([step.ms for step in steps])
    swaps = np.array([step.swaps for step in steps])
    mib = np.array([step.blocks * block_bytes / 2**20 for step in steps])
    copy_ms = np.array([step.copy_ms for step in steps])
    swapping = swaps > 0
    base, *_ = np.linalg.lstsq(decodes[~swapping], ms[~swapping], rcond=None)
    expected_ms = decodes[swapping] @ base
    extra_ms = ms[swapping] - expected_ms
    copy_fit, *_ = np.linalg.lstsq(
        np.column_stack([swaps[swapping], mib[swapping]]), copy_ms[swapping], rcond=None
    )
    remaining_ms = extra_ms.sum() - copy_fit[1] * mib[swapping].sum()
    return SwapCost(
        steps=len(steps),
        swapping_steps=int(swapping.sum()),
        requests_per_swapping_step=float(swaps[swapping].mean()),
        mib_per_swapping_step=float(mib[swapping].mean()),
        step_ms=float(expected_ms.mean()),
        extra_ms=float(extra_ms.mean()),
        copy_ms=float(copy_ms[swapping].mean()),
        ms_per_request=float(remaining_ms / swaps[swapping].sum()),
        ms_per_mib=float(copy_fit[1]),
    )


def main(arguments: Iterable[str] | None = None) -> None:
    """Run the benchmark; print and save its figures."""
    parser = argparse.ArgumentParser(prog="python -m experiments.swap", description=__doc__)
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(None if arguments is None else list(arguments))
    cost, block_bytes = asyncio.run(measure())
    figures: dict[str, object] = {"block_bytes": block_bytes, **asdict(cost)}
    path = save("swap", figures)
    if options.output == "json":
        print_json("swap", figures)
        return
    table = Table("figure", "value", title="Swapping on a vLLM worker, CPU time of its engine thread")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:.3g}" if isinstance(value, float) else str(value))
    Console().print(table)
    Console(stderr=True).print(f"saved to {path}")


if __name__ == "__main__":
    main()
