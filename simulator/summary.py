"""Format a run's figures as rows, for the terminal and for the report."""

from __future__ import annotations

import math

from simulator.scenario import Figures


def summary_rows(figures: Figures) -> list[tuple[str, str]]:
    """Return rows of (label, value with its unit)."""
    cached = f"{100 * figures.cached_share:.1f}%"
    if figures.loaded_share:
        cached += f", of which {100 * figures.loaded_share:.1f} points from host memory"
    rows = [
        ("Requests", f"{figures.requests} at {figures.rate_per_s:.3g}/s"),
        ("Finished", f"{figures.finished}"),
        ("Refused", f"{figures.refused}"),
        ("SLO attainment", f"{figures.attainment:.1%}"),
        ("Goodput", f"{figures.goodput_per_s:.3g} requests/s"),
        ("TTFT P50", _seconds(figures.ttft_p50_s)),
        ("TTFT P99", _seconds(figures.ttft_p99_s)),
        ("TPOT P50", _milliseconds(figures.tpot_p50_s)),
        ("TPOT P99", _milliseconds(figures.tpot_p99_s)),
        ("QoE, mean", f"{figures.qoe_mean:.3f}" if math.isfinite(figures.qoe_mean) else "-"),
        ("End to end P50", _seconds(figures.latency_p50_s)),
        ("End to end P99", _seconds(figures.latency_p99_s)),
        ("Throughput", f"{figures.tokens_per_s:,.0f} tokens/s"),
        ("Migrations", f"{figures.migrations}, {figures.migrated_bytes / 1024**3:.1f} GiB"),
        ("Longest pause by a migration", _milliseconds(figures.pause_max_s)),
        ("Prompt tokens cached", cached),
        ("Preemptions", f"{figures.swapped} swapped, {figures.recomputed} recomputed"),
    ]
    if figures.pool_changes:
        rows.append(("Pool changes", f"{figures.pool_changes}"))
    if figures.stage_changes:
        rows.append(("Stage changes", f"{figures.stage_changes}"))
    return rows


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if math.isfinite(value) else "-"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if math.isfinite(value) else "-"
