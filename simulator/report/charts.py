"""Charts over time: lines, stacked bars, length stages, and strips with a row per instance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from simulator.records import StageChange
from simulator.report.svg import PALETTE, Drawing
from tailrace.cluster import Stage

_ROUND: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from `low` to `high` over pixels `start` to `end`. For logarithmic axes, `low` is above 0."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value in pixels; values outside are clamped."""
        value = min(max(value, self.low), self.high)
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self, about: int = 6) -> list[float]:
        """Return about `about` round values within the axis."""
        return (
            _log_ticks(self.low, self.high, about) if self.logarithmic else _ticks(self.low, self.high, about)
        )


def linear(values: Sequence[float], start: float, end: float) -> Scale:
    """Return a scale from 0 to a round number above all values."""
    high = max(values, default=0.0)
    if not high > 0.0:
        high = 1.0
    step = _step(high / 5)
    return Scale(0.0, math.ceil(high / step - 1e-9) * step, start, end)


def logarithmic(values: Sequence[float], start: float, end: float) -> Scale:
    """Return a scale around all positive values, rounded to 1, 2 or 5 of a decade; without any, from 1 to
    10."""
    positive = [value for value in values if value > 0.0]
    if not positive:
        return Scale(1.0, 10.0, start, end, True)
    low, high = _round_down(min(positive)), _round_up(max(positive))
    return Scale(low, high if high > low else 10.0 * low, start, end, True)


def within(low: float, high: float, start: float, end: float) -> Scale:
    """Return a scale from exactly `low` to `high`, slightly extended if they are equal."""
    return Scale(low, high if high > low else low + 1.0, start, end)


def tick_text(value: float) -> str:
    """Format 1200 as 1,200, 20000 as 20k, 0.25 as 0.25."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in _ROUND if factor * power >= least * (1 - 1e-9))


def _ticks(low: float, high: float, about: int) -> list[float]:
    step = _step((high - low) / about)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, about: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        ticks = [
            digit * 10.0**decade
            for decade in decades
            for digit in digits
            if low * (1 - 1e-9) <= digit * 10.0**decade <= high * (1 + 1e-9)
        ]
        if len(ticks) <= about + 2:
            return ticks
    return ticks[:: -(-len(ticks) // about)]


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max(digit * power for digit in (1.0, 2.0, 5.0) if digit * power <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min(digit * power for digit in (1.0, 2.0, 5.0, 10.0) if digit * power >= value * (1 - 1e-9))


WIDTH: Final = 860.0
LEFT: Final = 74.0
RIGHT: Final = 18.0
TOP: Final = 12.0
BOTTOM: Final = 50.0
INNER_START: Final = LEFT
INNER_END: Final = WIDTH - RIGHT


def draw_frame(drawing: Drawing, x: Scale, y: Scale, x_label: str, y_label: str) -> None:
    """Draw grid lines, ticks and labels. The y scale starts at the bottom."""
    for value in y.ticks(5):
        at = y.place(value)
        drawing.line(x.start, at, x.end, at, "grid")
        drawing.text(x.start - 8, at + 4.5, tick_text(value), anchor="end")
    draw_x_axis(drawing, x, y.start, x_label)
    drawing.upright(17, (y.start + y.end) / 2, y_label)


def draw_x_axis(drawing: Drawing, x: Scale, bottom: float, label: str) -> None:
    """Draw the horizontal axis at `bottom`."""
    drawing.line(x.start, bottom, x.end, bottom, "axis")
    for value in x.ticks(8):
        at = x.place(value)
        drawing.line(at, bottom, at, bottom + 5, "axis")
        drawing.text(at, bottom + 20, tick_text(value), anchor="middle")
    drawing.text((x.start + x.end) / 2, bottom + 41, label, "label", "middle")


_LINES_HEIGHT: Final = 340.0
# Number of points above which a line is drawn without markers.
_MARKED: Final = 60
# Pixels between the whiskers of two lines, which would overlap otherwise.
_APART: Final = 5.0


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A point of a line. `half`: half the width of its interval; None: no whisker."""

    x: float
    y: float
    half: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A named series. `series`: its index in the palette, the same on every chart of a page."""

    name: str
    series: int
    points: Sequence[ChartPoint]


@dataclass(frozen=True, slots=True)
class Axis:
    """The label of an axis, with the unit, and its range."""

    label: str
    logarithmic: bool = False
    # Its end; None: that of the values.
    end: float | None = None
    # Whether it starts just below the first value instead of at 0.
    tight: bool = False


def line_chart(label: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """Draw a line chart. Points that are not finite are left out."""
    drawing = Drawing(WIDTH, _LINES_HEIGHT, label)
    points = [point for line in lines for point in _finite(line)]
    xs = [point.x for point in points] or [0.0]
    if x.logarithmic:
        x_scale = logarithmic(xs, INNER_START, INNER_END)
    else:
        margin = 0.05 * (max(xs) - min(xs)) if x.tight else 0.0
        start = min(xs) - margin if x.tight else 0.0
        x_scale = within(start, max(xs) + margin, INNER_START, INNER_END)
    bottom = _LINES_HEIGHT - BOTTOM
    if y.end is not None:
        y_scale = within(0.0, y.end, bottom, TOP)
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


def _finite(line: Line) -> list[ChartPoint]:
    return [point for point in line.points if math.isfinite(point.x) and math.isfinite(point.y)]


_BARS_HEIGHT: Final = 240.0


def stacked_bars(label: str, y_label: str, counts: Mapping[str, Sequence[int]], end_s: float) -> str:
    """Draw a stacked bar for each interval of time from 0 to `end_s`; each name has a count per interval.

    Names take the colours of the palette in order.
    """
    drawing = Drawing(WIDTH, _BARS_HEIGHT, label)
    bins = max((len(column) for column in counts.values()), default=1)
    totals = [float(sum(column[index] for column in counts.values())) for index in range(bins)]
    time = within(0.0, end_s, INNER_START, INNER_END)
    upward = linear(totals, _BARS_HEIGHT - BOTTOM, TOP)
    draw_frame(drawing, time, upward, "time (s)", y_label)
    for index in range(bins):
        start_s, stop_s = end_s * index / bins, end_s * (index + 1) / bins
        left, right = time.place(start_s), time.place(stop_s)
        below = 0.0
        for series, (name, column) in enumerate(counts.items()):
            if not column[index]:
                continue
            low, high = upward.place(below), upward.place(below + column[index])
            title = f"{name}: {column[index]} from {start_s:.4g} to {stop_s:.4g} s"
            drawing.rect(left, high, max(right - left - 1, 1), low - high, f"f{series % PALETTE}", title)
            below += column[index]
    return drawing.render()


_BANDS_HEIGHT: Final = 300.0
# Lengths are drawn on a logarithmic axis, which has no 0.
_SHORTEST: Final = 64


def stage_chart(changes: Sequence[StageChange], end_s: float) -> str:
    """Draw a band per stage with its number of instances."""
    drawing = Drawing(WIDTH, _BANDS_HEIGHT, "length stages over time")
    longest = max((stage.hi for change in changes for stage in change.stages), default=_SHORTEST * 2)
    time = within(0.0, end_s, INNER_START, INNER_END)
    length = Scale(_SHORTEST, max(longest, _SHORTEST * 2), _BANDS_HEIGHT - BOTTOM, TOP, True)
    draw_frame(drawing, time, length, "time (s)", "context (tokens)")
    ends = [*(change.at_s for change in changes[1:]), end_s]
    for change, until_s in zip(changes, ends, strict=True):
        for index, stage in enumerate(change.stages):
            _band(drawing, time, length, change.at_s, until_s, index, stage)
    return drawing.render()


def _band(
    drawing: Drawing, time: Scale, length: Scale, start_s: float, end_s: float, index: int, stage: Stage
) -> None:
    left, right = time.place(start_s), time.place(end_s)
    low, high = length.place(max(stage.lo, _SHORTEST)), length.place(stage.hi)
    count = len(stage.instance_ids)
    range_ = f"{tick_text(stage.lo)} to {tick_text(stage.hi)} tokens"
    title = f"{range_}: {', '.join(stage.instance_ids)} from {start_s:.4g} s"
    drawing.rect(left, high, right - left, low - high, f"soft f{index % PALETTE}", title)
    drawing.line(left, high, right, high, f"path s{index % PALETTE}")
    if right - left > 60 and low - high > 16:
        label = f"{count} instance{'' if count == 1 else 's'}"
        drawing.text((left + right) / 2, (low + high) / 2 + 4.5, label, anchor="middle")


_AXIS: Final = 52.0
# (Rows, height in pixels): rows get thinner with their number, and names that would not fit are left out.
_ROW: Final = ((12, 19.0), (32, 11.0), (64, 6.0), (10**9, 3.0))
_NAME: Final = 12.0


@dataclass(frozen=True, slots=True)
class Span:
    """A state from `start_s` to `end_s`. `kind`: CSS class of its colour; `title`: its description."""

    start_s: float
    end_s: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Row:
    """The spans of one instance."""

    name: str
    spans: Sequence[Span]


def strip_chart(label: str, rows: Sequence[Row], end_s: float) -> str:
    """Draw a row per instance, over time from 0 to `end_s`."""
    height = next(size for limit, size in _ROW if len(rows) <= limit)
    bottom = 6.0 + height * len(rows)
    drawing = Drawing(WIDTH, bottom + _AXIS, label)
    time = within(0.0, end_s, INNER_START, INNER_END)
    named = max(1, round(_NAME / height))
    for index, row in enumerate(rows):
        top = 6.0 + index * height
        if index % named == 0:
            drawing.text(INNER_START - 8, top + height / 2 + 4.5, row.name, anchor="end")
        for span in row.spans:
            start, end = time.place(span.start_s), time.place(span.end_s)
            gap = 1.0 if height > 4 else 0.0
            drawing.rect(start, top, end - start, height - gap, span.kind, f"{row.name}: {span.title}")
    draw_x_axis(drawing, time, bottom, "time (s)")
    return drawing.render()
