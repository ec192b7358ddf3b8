"""Charts of one run over time: KV use, pools, stages and migrations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from simulator.records import MigrationOutcome, MigrationRecord, PoolChange
from simulator.report.charts import Row, Span, stacked_bars, stage_chart, strip_chart
from simulator.report.page import Cell, colour_legend, figure, ramp_legend, table
from simulator.report.svg import PALETTE
from simulator.scenario import Detail
from tailrace.cluster import Pool

_LEVELS: Final = 10
# Columns of a strip: a page is about 860 pixels wide.
_COLUMNS: Final = 240
_BARS: Final = 60
_POOLS: Final[Mapping[Pool | None, tuple[str, str]]] = {
    Pool.PREFILL: ("prefill", "f0"),
    Pool.DECODE_TO_PREFILL: ("decode to prefill", "f5"),
    Pool.PREFILL_TO_DECODE: ("prefill to decode", "f4"),
    Pool.DECODE: ("decode", "f1"),
    None: ("no pool", "h1"),
}


def kv_use(detail: Detail) -> str:
    """Draw the KV use of each instance."""
    series = detail.series
    times = _thinned(series.times_s)
    share = series.kv_used_tokens[times] / detail.kv_capacity_tokens
    levels = np.clip((share * _LEVELS).astype(np.int64), 0, _LEVELS - 1)
    at_s = series.times_s[times].tolist()
    rows = []
    for column, name in enumerate(series.instance_ids):
        spans = _runs(at_s, levels[:, column].tolist(), share[:, column].tolist(), detail.end_s)
        rows.append(Row(name, spans))
    peak = float(share.max(initial=0.0))
    waiting = int(series.waiting.sum(axis=1).max(initial=0))
    caption = (
        f"One row per instance, with {detail.kv_capacity_tokens:,} tokens each; the fullest reached "
        f"{peak:.0%}. At most {waiting:,} requests waited at a time in the whole cluster."
    )
    return figure(
        strip_chart("KV use over time", rows, detail.end_s), caption, ramp_legend("KV empty", "full")
    )


def pool_membership(detail: Detail) -> str:
    """Draw the pool of each instance; "" without pools."""
    series = detail.series
    if all(change.pool is None for change in series.pools):
        return ""
    by_instance: dict[str, list[PoolChange]] = {name: [] for name in series.instance_ids}
    for change in series.pools:
        by_instance[change.instance_id].append(change)
    rows = [Row(name, _pool_spans(changes, detail.end_s)) for name, changes in by_instance.items()]
    seen = {change.pool for change in series.pools}
    legend = colour_legend([label for pool, label in _POOLS.items() if pool in seen])
    flips = len(series.pools) - len(series.instance_ids)
    changes = "No instance changed its pool" if not flips else f"{flips} changes of pool"
    caption = f"One row per instance. {changes}; an instance that changes finishes the work it has."
    return figure(strip_chart("pools over time", rows, detail.end_s), caption, legend)


def stages(detail: Detail) -> str:
    """Draw the stages and their boundaries; "" without stages."""
    changes = detail.series.stages
    if not any(change.stages for change in changes):
        return ""
    caption = (
        "One band per stage, for requests with contexts of that length. A moving boundary is a "
        "refinement, a new number of bands is a new plan. The axis is logarithmic."
    )
    return figure(stage_chart(changes, detail.end_s), caption)


def migrations(detail: Detail) -> str:
    """Draw when and why requests migrated; "" if none did."""
    asked = detail.migrations
    if not asked:
        return ""
    committed = [m for m in asked if m.outcome is MigrationOutcome.COMMITTED]
    reasons = [reason for reason, _ in Counter(m.reason for m in asked).most_common()]
    counts: dict[str, list[int]] = {reason: [0] * _BARS for reason in reasons}
    for migration in committed:
        bin_index = min(int(migration.end_s / detail.end_s * _BARS), _BARS - 1)
        counts[migration.reason][bin_index] += 1
    width_s = detail.end_s / _BARS
    legend = colour_legend([(reason, f"f{n % PALETTE}") for n, reason in enumerate(reasons)])
    caption = f"Committed migrations, one bar per {width_s:.3g} s."
    picture = figure(
        stacked_bars("migrations over time", "migrations", counts, detail.end_s), caption, legend
    )
    return picture + _table(asked, reasons)


def _table(records: Sequence[MigrationRecord], reasons: Sequence[str]) -> str:
    rows = []
    for reason in reasons:
        those = [m for m in records if m.reason == reason]
        done = [m for m in those if m.outcome is MigrationOutcome.COMMITTED]
        pauses = [m.pause_s * 1e3 for m in done]
        rows.append(
            [
                Cell(reason),
                Cell(f"{len(those):,}"),
                *(Cell(f"{sum(m.outcome is outcome for m in those):,}") for outcome in MigrationOutcome),
                Cell(f"{sum(m.bytes_sent for m in done) / 1024**3:,.1f}"),
                Cell(f"{np.percentile(pauses, 50):.3g}" if pauses else "-"),
                Cell(f"{np.percentile(pauses, 99):.3g}" if pauses else "-"),
            ]
        )
    outcomes = [outcome.value.replace("_", " ") for outcome in MigrationOutcome]
    headings = ["reason", "asked", *outcomes, "GiB sent", "pause P50 (ms)", "pause P99 (ms)"]
    caption = (
        "Overtaken: the request ended or was preempted first. Requests that do not migrate continue "
        "where they are."
    )
    return table(headings, rows, caption)


def _thinned(times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[int]:
    """Return the indices of at most _COLUMNS samples, evenly spaced."""
    if len(times) <= _COLUMNS:
        return list(range(len(times)))
    return [round(index) for index in np.linspace(0, len(times) - 1, _COLUMNS).tolist()]


def _runs(at_s: Sequence[float], levels: Sequence[int], shares: Sequence[float], end_s: float) -> list[Span]:
    """Merge consecutive samples with the same level into spans."""
    spans: list[Span] = []
    first = 0
    for index in range(1, len(levels) + 1):
        if index < len(levels) and levels[index] == levels[first]:
            continue
        until = at_s[index] if index < len(levels) else end_s
        mean = sum(shares[first:index]) / (index - first)
        spans.append(Span(at_s[first], until, f"h{levels[first]}", f"{mean:.0%} at {at_s[first]:.4g} s"))
        first = index
    return spans


def _pool_spans(changes: Sequence[PoolChange], end_s: float) -> list[Span]:
    ends = [*(change.at_s for change in changes[1:]), end_s]
    spans = []
    for change, until in zip(changes, ends, strict=True):
        label, kind = _POOLS[change.pool]
        spans.append(Span(change.at_s, until, kind, f"{label} from {change.at_s:.4g} to {until:.4g} s"))
    return spans
