"""Measure KV in device memory: gather, scatter and checksums, compared with the copy engine and with UCX."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.setting import Budget, Setting
from benchmarks.gpu.tables import Rows
from benchmarks.transfer import perftest_mib_per_s
from worker_agent.engine.vllm.kv_blocks import KvBlocks

_REPEATS = 7
_MESSAGE_BYTES = 8 << 20


def kv_layers(setting: Setting) -> list[torch.Tensor]:
    """Create a KV cache in vLLM's layout: a tensor per layer, [blocks, K and V, tokens, heads, head
    dimension]."""
    shape = setting.shape
    size = (setting.pool_blocks, 2, setting.block_tokens, shape.num_key_value_heads, shape.head_dim)
    dtype = getattr(torch, shape.dtype)
    layers = range(shape.num_hidden_layers)
    return [torch.randn(size, device=setting.device).to(dtype) for _ in layers]


def seconds(device: str, work: Callable[[], object]) -> float:
    """Return the median of several synchronized runs; the first, which compiles, does not count."""
    durations = []
    for turn in range(_REPEATS + 1):
        _synchronize(device)
        started_s = time.perf_counter()
        work()
        _synchronize(device)
        if turn:
            durations.append(time.perf_counter() - started_s)
    return statistics.median(durations)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run(setting: Setting, model: Path, budget: Budget) -> dict[str, object]:
    """Measure rates in GiB/s of KV (read once, written once), by number of blocks."""
    del model
    kv = KvBlocks(kv_layers(setting), setting.pool_blocks)
    rng = random.Random(0)
    rates = [_rates(kv, setting, count, rng) for count in setting.moved_blocks]
    memories = ("host", "cuda") if setting.device == "cuda" else ("host",)
    ucx: dict[str, float | str] = {}
    for memory in memories:
        if budget.left_s < 60:
            ucx[memory] = "not run: out of time"
            continue
        try:
            ucx[memory] = perftest_mib_per_s(_MESSAGE_BYTES, memory) / 1024
        except RuntimeError as error:
            ucx[memory] = f"failed: {error}"
    return {
        "block_bytes": kv.num_layers * kv.layer_block_bytes,
        "checksum": kv.checksum_name,
        "gib_per_s": rates,
        "ucx_perftest_gib_per_s": ucx,
    }


def _rates(kv: KvBlocks, setting: Setting, count: int, rng: random.Random) -> dict[str, float]:
    ids = rng.sample(range(setting.pool_blocks), count)
    targets = rng.sample(range(setting.pool_blocks), count)
    out, copy = kv.staging(count), kv.staging(count)
    _check_round_trip(kv, ids, targets, count)
    kv.gather(ids, out)
    host = torch.empty(out.bytes.shape, dtype=torch.uint8, pin_memory=setting.device == "cuda")
    work: dict[str, Callable[[], object]] = {
        "copy on the device": lambda: copy.bytes.copy_(out.bytes),
        "copy to pinned host memory": lambda: host.copy_(out.bytes),
        "copy from pinned host memory": lambda: out.bytes.copy_(host),
        "gather with checksums": lambda: kv.gather(ids, out),
        "checksums alone": lambda: kv.checksums(out, count),
        "scatter": lambda: kv.scatter(out, targets),
    }
    gib = count * kv.num_layers * kv.layer_block_bytes / (1 << 30)
    rates = {name: gib / seconds(setting.device, each) for name, each in work.items()}
    return {"blocks": count, "mib": gib * 1024, **rates}


def _check_round_trip(kv: KvBlocks, ids: list[int], targets: list[int], count: int) -> None:
    """Check that KV is unchanged by scatter and gather. Raise RuntimeError otherwise."""
    staged, regathered = kv.staging(count), kv.staging(count)
    sums = kv.gather(ids, staged)
    kv.scatter(staged, targets)
    if kv.gather(targets, regathered) != sums or not torch.equal(staged.bytes, regathered.bytes):
        raise RuntimeError("KV was changed by gather and scatter")


def table(figures: dict[str, object]) -> Rows:
    """Return a row per operation, and one per memory type of UCX."""
    rates = figures["gib_per_s"]
    ucx = figures["ucx_perftest_gib_per_s"]
    assert isinstance(rates, list)
    assert isinstance(ucx, dict)
    names = [name for name in rates[0] if name not in ("blocks", "mib")]
    rows = [[name, *(f"{rate[name]:.1f}" for rate in rates)] for name in names]
    for memory, found in ucx.items():
        shown = found if isinstance(found, str) else f"{found:.1f}"
        rows.append([f"ucx_perftest, {memory} memory", shown, *[""] * (len(rates) - 1)])
    columns = [f"{rate['mib']:,.1f} MiB" for rate in rates]
    return Rows("KV in device memory, GiB/s", ["", *columns], rows)
