"""Compare two instances on one GPU behind Tailrace with `vllm serve` with its defaults, one after the
other."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.cluster import plain_vllm, tailrace_cluster
from benchmarks.gpu.model import prompt
from benchmarks.gpu.setting import Budget, Setting
from benchmarks.gpu.tables import Rows
from tests.harness.loadgen import StreamResult, completion_request, percentile, run_streams
from tests.harness.servers import MODEL, Server


@dataclass(frozen=True)
class Load:
    """Results of one load on one server. Times in milliseconds; gaps are between a stream's events."""

    server: str
    streams: int
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float


def summarize(server: str, results: Sequence[StreamResult]) -> Load:
    """Aggregate the results of a load. Raise RuntimeError if a stream failed."""
    if failed := [result.error for result in results if result.error]:
        raise RuntimeError(f"{server}: {len(failed)} of {len(results)} streams failed: {failed[0]}")
    seconds = max(r.finished for r in results) - min(r.started for r in results)
    ttfts = [result.ttft * 1000 for result in results]
    gaps = [gap * 1000 for result in results for gap in result.gaps]
    return Load(
        server=server,
        streams=len(results),
        tokens_per_s=sum(result.tokens for result in results) / seconds,
        ttft_p50_ms=percentile(ttfts, 0.5),
        ttft_p99_ms=percentile(ttfts, 0.99),
        gap_p50_ms=percentile(gaps, 0.5),
        gap_p99_ms=percentile(gaps, 0.99),
    )


def _measure(server: Server, setting: Setting, streams: int, turn: int) -> Load:
    vocabulary = setting.shape.vocab_size
    texts = [prompt(setting.prompt_tokens, vocabulary, 100_000 * turn + n) for n in range(streams)]
    requests = [completion_request(server.url, MODEL, text, setting.output_tokens) for text in texts]
    return summarize(server.name, asyncio.run(run_streams(server.url, requests, timeout_s=120)))


def _loads(server: Server, setting: Setting, budget: Budget, share_s: float) -> list[Load]:
    """Run all loads, as many rounds as time permits, after a warm-up."""
    _measure(server, setting, max(setting.streams), 0)
    found: list[Load] = []
    for turn in range(1, setting.rounds + 1):
        if found and budget.left_s < share_s:
            break
        found += [_measure(server, setting, n, turn * 10 + i) for i, n in enumerate(setting.streams)]
    return found


def run(setting: Setting, model: Path, budget: Budget) -> dict[str, object]:
    """Run every load on both servers, not concurrently: each uses the GPU's memory as it would alone."""
    with tailrace_cluster(setting, model, 2) as ours:
        loads = _loads(ours, setting, budget, share_s=240)
    with plain_vllm(setting, model) as theirs:
        loads += _loads(theirs, setting, budget, share_s=30)
    return {"loads": [asdict(load) for load in loads], "medians": medians(loads)}


def medians(loads: Sequence[Load]) -> list[dict[str, object]]:
    """Return medians of both servers and the ratio ours / theirs, for each number of streams."""
    servers = list(dict.fromkeys(load.server for load in loads))
    found: list[dict[str, object]] = []
    for streams in dict.fromkeys(load.streams for load in loads):
        for figure in ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms"):
            values = [
                statistics.median(getattr(x, figure) for x in loads if (x.server, x.streams) == (s, streams))
                for s in servers
            ]
            ratio = values[0] / values[-1] if values[-1] else None
            row = {"streams": streams, "figure": figure, **dict(zip(servers, values, strict=True))}
            found.append(row | {"ratio": ratio})
    return found


def table(figures: dict[str, object]) -> Rows:
    """Return a row per load and figure."""
    found = figures["medians"]
    assert isinstance(found, list)
    names = [name for name in found[0] if name not in ("streams", "figure")]
    rows = [
        [
            f"{row['streams']} streams, {row['figure'].replace('_', ' ')}",
            *("" if row[n] is None else f"{row[n]:,.2f}" for n in names),
        ]
        for row in found
    ]
    return Rows("Medians; ratio: the first to the second", ["load", *names], rows)
