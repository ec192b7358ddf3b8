"""The area of a chart with its axes."""

from __future__ import annotations

from typing import Final

from simulator.report.scale import Scale, tick_text
from simulator.report.svg import Drawing

WIDTH: Final = 860.0
LEFT: Final = 74.0
RIGHT: Final = 18.0
TOP: Final = 12.0
BOTTOM: Final = 50.0
INNER_START: Final = LEFT
INNER_END: Final = WIDTH - RIGHT


def draw_frame(drawing: Drawing, x: Scale, y: Scale, x_label: str, y_label: str) -> None:
    """Grid lines, marks and labels. The y scale runs upwards: its start is the bottom."""
    for value in y.ticks(5):
        at = y.place(value)
        drawing.line(x.start, at, x.end, at, "grid")
        drawing.text(x.start - 8, at + 4.5, tick_text(value), anchor="end")
    draw_x_axis(drawing, x, y.start, x_label)
    drawing.upright(17, (y.start + y.end) / 2, y_label)


def draw_x_axis(drawing: Drawing, x: Scale, bottom: float, label: str) -> None:
    """The horizontal axis at `bottom`."""
    drawing.line(x.start, bottom, x.end, bottom, "axis")
    for value in x.ticks(8):
        at = x.place(value)
        drawing.line(at, bottom, at, bottom + 5, "axis")
        drawing.text(at, bottom + 20, tick_text(value), anchor="middle")
    drawing.text((x.start + x.end) / 2, bottom + 41, label, "label", "middle")
