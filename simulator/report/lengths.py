"""Charts of TTFT by request length, and of its distribution, for one or several policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from simulator.goodput import BIN_TOKENS, percentile_for, tail_by_bin
from simulator.report.charts import Axis, ChartPoint, Line, line_chart
from simulator.report.page import figure, line_legend

# (reasoning tokens, prompt tokens, TTFT in seconds)
TtftPoint = tuple[int, int, float]
_QUANTILES: Final = 100


def by_reasoning(points: Mapping[str, Sequence[Sequence[TtftPoint]]]) -> str:
    """Draw the tail TTFT of requests that reason, a line per policy, averaged over its runs; "" without any.

    Bins that some run does not have are left out, so that every point covers the same runs.
    """
    lines = []
    for series, (name, runs) in enumerate(points.items()):
        tails = [tail_by_bin((reasoning, ttft) for reasoning, _, ttft in run if reasoning) for run in runs]
        common = sorted(set.intersection(*(set(tail) for tail in tails))) if tails else []
        middle = BIN_TOKENS / 2
        drawn = [ChartPoint(at + middle, float(np.mean([tail[at] for tail in tails]))) for at in common]
        lines.append(Line(name, series, drawn))
    if not any(line.points for line in lines):
        return ""
    picture = line_chart(
        "tail TTFT by reasoning length",
        Axis("reasoning (tokens, bins of 256)"),
        Axis("tail TTFT (s)"),
        lines,
    )
    caption = (
        "Time from submission to the first answering token, all of the reasoning included: lower is better. "
        "Of each bin the maximum, P90, P95 or P99, by its size (PASCAL, figure 10); bins of fewer than 5 "
        "requests are left out."
    )
    return figure(picture, caption, line_legend([(line.name, line.series) for line in lines]))


def by_prompt(points: Mapping[str, Sequence[Sequence[TtftPoint]]]) -> str:
    """Draw the tail TTFT of requests that do not reason by prompt length, in bins that double."""
    lines = []
    for series, (name, runs) in enumerate(points.items()):
        tails = [
            _by_power((prompt, ttft) for reasoning, prompt, ttft in run if not reasoning) for run in runs
        ]
        common = sorted(set.intersection(*(set(tail) for tail in tails))) if tails else []
        drawn = [ChartPoint(2.0**at * 1.5, float(np.mean([tail[at] for tail in tails]))) for at in common]
        lines.append(Line(name, series, drawn))
    if not any(line.points for line in lines):
        return ""
    picture = line_chart(
        "tail TTFT by prompt length",
        Axis("prompt (tokens)", logarithmic=True),
        Axis("tail TTFT (s)", logarithmic=True),
        lines,
    )
    caption = (
        "Time from submission to the first token, for prompts of 2^n to 2^(n+1) tokens: lower is better. "
        "Both axes are logarithmic. Of each bin the maximum, P90, P95 or P99, by its size; of fewer than "
        "5 requests nothing."
    )
    return figure(picture, caption, line_legend([(line.name, line.series) for line in lines]))


def distribution(points: Mapping[str, Sequence[Sequence[TtftPoint]]]) -> str:
    """Draw the cumulative distribution of the time to the first answering token, over all runs."""
    lines = []
    for series, (name, runs) in enumerate(points.items()):
        values = [ttft for run in runs for _, _, ttft in run]
        if not values:
            continue
        shares = np.linspace(0.5, 99.5, _QUANTILES)
        quantiles = np.percentile(values, shares)
        drawn = [
            ChartPoint(max(float(at), 1e-3), float(share))
            for at, share in zip(quantiles, shares, strict=True)
        ]
        # Too many points for markers.
        lines.append(Line(name, series, drawn))
    if not lines:
        return ""
    picture = line_chart(
        "distribution of TTFT", Axis("TTFT (s)", logarithmic=True), Axis("requests (%)", end=100.0), lines
    )
    caption = "Share of requests that had their first answering token by then: further left is better."
    return figure(picture, caption, line_legend([(line.name, line.series) for line in lines]))


def _by_power(points: Iterable[tuple[int, float]]) -> dict[int, float]:
    bins: dict[int, list[float]] = {}
    for length, seconds in points:
        bins.setdefault(length.bit_length() - 1, []).append(seconds)
    tails: dict[int, float] = {}
    for power, inside in bins.items():
        percentile = percentile_for(len(inside))
        if percentile is not None:
            tails[power] = float(np.percentile(inside, percentile))
    return tails
