"""KV in device memory: gather, scatter and checksum beside the copy engine, and UCX beside both."""

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
    """A KV cache as vLLM lays it out: a tensor a layer, [blocks, K and V, tokens, heads, head dimension]."""
    shape = setting.shape
    size = (setting.pool_blocks, 2, setting.block_tokens, shape.num_key_value_heads, shape.head_dim)
    kind = getattr(torch, shape.dtype)
    layers = range(shape.num_hidden_layers)
    return [torch.randn(size, device=setting.device).to(kind) for _ in layers]


def seconds(device: str, work: Callable[[], object]) -> float:
    """Median of several runs, each complete on the device; the first, which compiles, does not count."""
    taken = []
    for turn in range(_REPEATS + 1):
        _complete(device)
        begun = time.perf_counter()
        work()
        _complete(device)
        if turn:
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def _complete(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run(setting: Setting, model: Path, budget: Budget) -> dict[str, object]:
    """Rates in GiB/s of KV moved (read once, written once), by number of blocks."""
    del model
    kv = KvBlocks(kv_layers(setting), setting.pool_blocks)
    draw = random.Random(0)
    rates = [_rates(kv, setting, count, draw) for count in setting.moved_blocks]
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


def _rates(kv: KvBlocks, setting: Setting, count: int, draw: random.Random) -> dict[str, float]:
    ids = draw.sample(range(setting.pool_blocks), count)
    there = draw.sample(range(setting.pool_blocks), count)
    out, copy = kv.staging(count), kv.staging(count)
    _check(kv, ids, there, count)
    kv.gather(ids, out)
    host = torch.empty(out.bytes.shape, dtype=torch.uint8, pin_memory=setting.device == "cuda")
    work: dict[str, Callable[[], object]] = {
        "copy on the device": lambda: copy.bytes.copy_(out.bytes),
        "copy to pinned host memory": lambda: host.copy_(out.bytes),
        "copy from pinned host memory": lambda: out.bytes.copy_(host),
        "gather with checksums": lambda: kv.gather(ids, out),
        "checksums alone": lambda: kv.checksums(out, count),
        "scatter": lambda: kv.scatter(out, there),
    }
    gib = count * kv.num_layers * kv.layer_block_bytes / (1 << 30)
    rates = {name: gib / seconds(setting.device, each) for name, each in work.items()}
    return {"blocks": count, "mib": gib * 1024, **rates}


def _check(kv: KvBlocks, ids: list[int], there: list[int], count: int) -> None:
    """What is scattered and gathered again is what it was. Raise RuntimeError otherwise."""
    staged, again = kv.staging(count), kv.staging(count)
    sums = kv.gather(ids, staged)
    kv.scatter(staged, there)
    if kv.gather(there, again) != sums or not torch.equal(staged.bytes, again.bytes):
        raise RuntimeError("KV that was gathered and scattered is not what it was")


def table(figures: dict[str, object]) -> Rows:
    """A row for each way of moving KV, and one for each memory of UCX."""
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
