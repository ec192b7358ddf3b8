"""The page that tells which policy to choose, docs/policies-compared.md, and its plots."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from experiments.policies.grounds import GROUNDS, Ground
from simulator.estimate import best_of, estimate

# Values of a figure by policy, one per seed.
Values = Mapping[str, Sequence[float]]
# (ground, share of the capacity) -> policy -> figure -> one value per seed.
Found = Mapping[tuple[str, float], Mapping[str, Mapping[str, Sequence[float]]]]
# Heading, decimals, factor, and the figures of a column, each with 1 if more is better, -1 if less is, or 0.
COLUMNS: Final = (
    ("in SLO %", 1, 100.0, (("attainment", 1),)),
    ("goodput /s", 1, 1.0, (("goodput_per_s", 1),)),
    ("TTFT s, P50 / P95 / P99", 2, 1.0, (("ttft_p50_s", -1), ("ttft_p95_s", -1), ("ttft_p99_s", -1))),
    ("TPOT ms, P50 / P99", 0, 1e3, (("tpot_p50_s", -1), ("tpot_p99_s", -1))),
    ("end to end s, P50 / P99", 1, 1.0, (("latency_p50_s", -1), ("latency_p99_s", -1))),
    (
        "P99 TTFT s, shortest / longest prompts",
        1,
        1.0,
        (("ttft_p99_prompt_q1_s", -1), ("ttft_p99_prompt_q4_s", -1)),
    ),
    (
        "shortest / longest outputs",
        1,
        1.0,
        (("ttft_p99_output_q1_s", -1), ("ttft_p99_output_q4_s", -1)),
    ),
    ("preemptions", 0, 1.0, (("swapped", 0),)),
    ("moves", 0, 1.0, (("migrations", 0),)),
)
# Figure, heading, factor, and 1 if more is better.
_PLOTTED: Final = (
    ("attainment", "in SLO %", 100.0, 1),
    ("ttft_p99_s", "TTFT P99 s", 1.0, -1),
    ("tpot_p99_s", "TPOT P99 ms", 1e3, -1),
)
_COLORS: Final = ("#2563eb", "#c2410c")


def of_figure(found: Mapping[str, Mapping[str, Sequence[float]]], figure: str) -> Values:
    """Return one figure of all policies."""
    return {policy: figures[figure] for policy, figures in found.items()}


def best_names(values: Values, better: int) -> frozenset[str]:
    """Return the best policy and all that cannot be distinguished from it."""
    best = best_of(values, better)
    return frozenset() if best is None else best.tied | {best.name}


def table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Return the rows of a table: means, bold where no other policy is distinguishably better."""
    lines = [
        "| policy | " + " | ".join(heading for heading, _, _, _ in COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    best = {
        figure: best_names(of_figure(found, figure), better) if better else frozenset()
        for _, _, _, figures in COLUMNS
        for figure, better in figures
    }
    for policy, values in found.items():
        cells = []
        for _, decimals, factor, figures in COLUMNS:
            parts = []
            for figure, _ in figures:
                mean = estimate(values[figure])
                text = f"{factor * mean.mean:.{decimals}f}"
                if figure == "attainment" and mean.half_width is not None:
                    text += f" ±{factor * mean.half_width:.{decimals}f}"
                parts.append(f"**{text}**" if policy in best[figure] else text)
            cells.append(" / ".join(parts))
        lines.append(f"| `{policy}` | " + " | ".join(cells) + " |")
    return lines


def plot(ground: Ground, shares: Sequence[float], found: Found) -> str:
    """Return an SVG: per policy the means and 95% intervals at each share of the capacity; hollow where
    another policy is distinguishably better."""
    policies = list(found[ground.name, shares[0]])
    row, top, left, panel, gap = 22, 76, 210, 220, 30
    height, width = top + row * len(policies) + 34, left + (panel + gap) * len(_PLOTTED)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="20" font-size="15" fill="#111">{escape(ground.title)}</text>',
    ]
    for at, share in enumerate(shares):
        x = left + at * 170
        parts.append(f'<circle cx="{x}" cy="36" r="4" fill="{_COLORS[at]}"/>')
        parts.append(f'<text x="{x + 9}" y="40" fill="#111">{share:.0%} of capacity</text>')
    for at, policy in enumerate(policies):
        y = top + row * at + 15
        parts.append(f'<text x="{left - 12}" y="{y}" text-anchor="end" fill="#111">{escape(policy)}</text>')
    for number, (figure, heading, factor, better) in enumerate(_PLOTTED):
        x0 = left + number * (panel + gap)
        estimates = {
            (share, policy): estimate([factor * value for value in values])
            for share in shares
            for policy, values in of_figure(found[ground.name, share], figure).items()
        }
        spans = [(e.mean - (e.half_width or 0.0), e.mean + (e.half_width or 0.0)) for e in estimates.values()]
        low, high = max(0.0, min(span[0] for span in spans)), max(span[1] for span in spans)
        high = min(high, 100.0) if figure == "attainment" else high
        scale = panel / ((high - low) or 1.0)
        bottom = top + row * len(policies)
        parts.append(f'<text x="{x0}" y="{top - 14}" fill="#111">{escape(heading)}</text>')
        parts.append(f'<line x1="{x0}" y1="{bottom}" x2="{x0 + panel}" y2="{bottom}" stroke="#999"/>')
        for value in (low, (low + high) / 2, high):
            tick = x0 + (value - low) * scale
            parts.append(f'<line x1="{tick:.1f}" y1="{top}" x2="{tick:.1f}" y2="{bottom}" stroke="#e5e5e5"/>')
            parts.append(
                f'<text x="{tick:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#555">{value:.3g}</text>'
            )
        for at, share in enumerate(shares):
            best = best_names(of_figure(found[ground.name, share], figure), better)
            for index, policy in enumerate(policies):
                mean = estimates[share, policy]
                y = top + row * index + 8 + 7 * at
                half = mean.half_width or 0.0
                ends = [
                    x0 + (min(max(v, low), high) - low) * scale for v in (mean.mean - half, mean.mean + half)
                ]
                at_mean = x0 + (min(max(mean.mean, low), high) - low) * scale
                color, fill = _COLORS[at], _COLORS[at] if policy in best else "#ffffff"
                parts.append(
                    f'<line x1="{ends[0]:.1f}" y1="{y}" x2="{ends[1]:.1f}" y2="{y}" stroke="{color}"/>'
                )
                parts.append(f'<circle cx="{at_mean:.1f}" cy="{y}" r="3.5" stroke="{color}" fill="{fill}"/>')
    return "\n".join([*parts, "</svg>", ""])


def section(ground: Ground, shares: Sequence[float], rates: Mapping[float, float], found: Found) -> list[str]:
    """Return a ground's part of the page."""
    slo, fleet = ground.slo, ground.fleet
    lines = [
        f"## {ground.title}",
        "",
        f"`{ground.workload.rpartition('/')[2]}` on {fleet.instances} instances of `{fleet.profile}`; TTFT "
        f"{slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s.",
        "",
        f"![{ground.title}](images/policies-{ground.name}.svg)",
        "",
    ]
    for share in shares:
        lines += [f"At {share:.0%} of the capacity, {rates[share]:.3g} requests/s:", ""]
        lines += [*table(found[ground.name, share]), ""]
    return lines


def with_parts(page: str, new: str) -> str:
    """Return the page with the parts that `new` has, too, replaced by those; headings part them."""
    headings = re.compile(r"^(?=##? )", re.MULTILINE)
    parts = {part.partition("\n")[0]: part for part in headings.split(new)}
    kept = [parts.get(part.partition("\n")[0], part).rstrip("\n") for part in headings.split(page)]
    return "\n\n".join(filter(None, kept)) + "\n"


def grounds_of(found: Found) -> list[Ground]:
    """Return the grounds that were measured, in their order."""
    return [ground for name, ground in GROUNDS.items() if any(name == measured for measured, _ in found)]
