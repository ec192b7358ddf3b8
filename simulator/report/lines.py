"""Line charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from simulator.report.frame import BOTTOM, INNER_END, INNER_START, TOP, WIDTH, draw_frame
from simulator.report.scale import linear, logarithmic, tick_text, within
from simulator.report.svg import Drawing

_HEIGHT: Final = 340.0
# Points beyond which a line is drawn without markers.
_MARKED: Final = 60
# Pixels between the whiskers of two lines, which would else hide each other.
_APART: Final = 5.0


@dataclass(frozen=True, slots=True)
class Point:
    """`half`: half the width of its interval; None: none is drawn."""

    x: float
    y: float
    half: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A named series. `series`: its place in the palette, the same on every chart of a page."""

    name: str
    series: int
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Axis:
    """What is on it, with the unit."""

    label: str
    logarithmic: bool = False
    # It ends there; None: where its values do.
    most: float | None = None
    # It begins a little before the first value, not at 0.
    close: bool = False


def line_chart(label: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """The picture. Points that are not numbers are left out."""
    drawing = Drawing(WIDTH, _HEIGHT, label)
    points = [point for line in lines for point in _finite(line)]
    xs = [point.x for point in points] or [0.0]
    if x.logarithmic:
        x_scale = logarithmic(xs, INNER_START, INNER_END)
    else:
        margin = 0.05 * (max(xs) - min(xs)) if x.close else 0.0
        start = min(xs) - margin if x.close else 0.0
        x_scale = within(start, max(xs) + margin, INNER_START, INNER_END)
    bottom = _HEIGHT - BOTTOM
    if y.most is not None:
        y_scale = within(0.0, y.most, bottom, TOP)
    elif y.logarithmic:
        y_scale = logarithmic([point.y for point in points], bottom, TOP)
    else:
        y_scale = linear([point.y + (point.half or 0.0) for point in points], bottom, TOP)
    draw_frame(drawing, x_scale, y_scale, x.label, y.label)
    for line in lines:
        drawn = _finite(line)
        aside = _APART * (line.series - (len(lines) - 1) / 2) if any(p.half for p in drawn) else 0.0
        placed = [(x_scale.place(point.x) + aside, y_scale.place(point.y)) for point in drawn]
        if len(placed) > 1:
            drawing.path(placed, line.series)
        if len(drawn) > _MARKED:
            continue
        for point, (at, height) in zip(drawn, placed, strict=True):
            if point.half:
                low, high = y_scale.place(point.y - point.half), y_scale.place(point.y + point.half)
                drawing.line(at, low, at, high, f"whisker s{line.series % 8}")
            interval = f" ± {point.half:.3g}" if point.half else ""
            title = f"{line.name}: {tick_text(point.x)} → {point.y:.4g}{interval}"
            drawing.marker(at, height, line.series, title)
    return drawing.render()


def _finite(line: Line) -> list[Point]:
    return [point for point in line.points if math.isfinite(point.x) and math.isfinite(point.y)]
