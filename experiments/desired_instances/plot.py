"""The picture of the day: load, instances and SLO attainment over time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final, NamedTuple

from experiments.desired_instances.following import Sample

_WIDTH: Final = 860
_LEFT: Final = 60
_DRAWN: Final = 780
_PANEL: Final = 130
_GAP: Final = 52
_TOP: Final = 44
_COLORS: Final = ("#2563eb", "#7c3aed", "#15803d", "#c2410c")


class Line(NamedTuple):
    """A line of a panel; times as shares of the day."""

    name: str
    color: str
    times: Sequence[float]
    values: Sequence[float]
    steps: bool = False


class Panel(NamedTuple):
    """One of the charts, which share the axis of time."""

    title: str
    low: float
    high: float
    decimals: int
    lines: Sequence[Line]


def plot(
    rates: Sequence[float], samples: Sequence[Sample], met: Mapping[str, Sequence[float]], day_s: float
) -> str:
    """Return an SVG: the arrivals per second, the instances of a fleet that follows them, and the share of
    requests in SLO of each fleet."""
    middles = [(number + 0.5) / len(rates) for number in range(len(rates))]
    times = [min(sample.at_s / day_s, 1.0) for sample in samples]
    panels = [
        Panel("Arrivals per second", 0.0, max(rates) * 1.1, 1, [Line("", "#111111", middles, rates)]),
        Panel(
            "Instances",
            0.0,
            # Even, for a whole number in the middle.
            2.0 * (max(sample.paid for sample in samples) // 2 + 1),
            0,
            [
                Line("load needs", "#9ca3af", times, [sample.needed for sample in samples]),
                Line("desired", "#c2410c", times, [sample.desired for sample in samples], True),
                Line("taking requests", "#2563eb", times, [sample.active for sample in samples], True),
            ],
        ),
        Panel(
            "Requests in SLO, %",
            100 * min(0.9, *map(min, met.values())),
            100.0,
            0,
            [
                Line(name, color, middles, [100 * share for share in shares])
                for (name, shares), color in zip(met.items(), itertools.cycle(_COLORS), strict=False)
            ],
        ),
    ]
    height = _TOP + len(panels) * (_PANEL + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, _TOP + number * (_PANEL + _GAP), day_s / 3600.0)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, top: float, hours: float) -> Iterable[str]:
    def y(value: float) -> float:
        share = (min(max(value, panel.low), panel.high) - panel.low) / (panel.high - panel.low)
        return top + _PANEL * (1.0 - share)

    yield f'<text x="10" y="{top - 8}" fill="#111" font-weight="bold">{escape(panel.title)}</text>'
    for value in (panel.low, (panel.low + panel.high) / 2, panel.high):
        at, text = y(value), f"{value:.{panel.decimals}f}"
        yield f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_LEFT + _DRAWN}" y2="{at:.1f}" stroke="#e5e5e5"/>'
        yield f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" fill="#555">{text}</text>'
    for quarter in range(5):
        x, below = _LEFT + _DRAWN * quarter / 4, top + _PANEL + 16
        yield f'<text x="{x}" y="{below}" text-anchor="middle" fill="#555">{hours * quarter / 4:g} h</text>'
    legend = _LEFT + 130.0
    for line in panel.lines:
        points = [(_LEFT + _DRAWN * at, y(value)) for at, value in zip(line.times, line.values, strict=True)]
        if line.steps:
            points = [p for one, other in itertools.pairwise(points) for p in (one, (other[0], one[1]))]
        drawn = " ".join(f"{x:.1f},{at:.1f}" for x, at in points)
        yield f'<polyline fill="none" stroke="{line.color}" stroke-width="1.4" points="{drawn}"/>'
        if line.name:
            ends = f'x1="{legend:.0f}" y1="{top - 12}" x2="{legend + 18:.0f}" y2="{top - 12}"'
            yield f'<line {ends} stroke="{line.color}" stroke-width="2"/>'
            yield f'<text x="{legend + 23:.0f}" y="{top - 8}" fill="#111">{escape(line.name)}</text>'
            legend += 40 + 6.6 * len(line.name)
