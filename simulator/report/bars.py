"""Stacked bars over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from simulator.report.frame import BOTTOM, INNER_END, INNER_START, TOP, WIDTH, draw_frame
from simulator.report.scale import linear, within
from simulator.report.svg import PALETTE, Drawing

_HEIGHT: Final = 240.0


def stacked_bars(label: str, y_label: str, counts: Mapping[str, Sequence[int]], end_s: float) -> str:
    """A bar for each stretch of time from 0 to `end_s`; each name's counts have one entry a stretch.

    Names take the palette's colours in their order.
    """
    drawing = Drawing(WIDTH, _HEIGHT, label)
    bins = max((len(column) for column in counts.values()), default=1)
    totals = [float(sum(column[place] for column in counts.values())) for place in range(bins)]
    time = within(0.0, end_s, INNER_START, INNER_END)
    upward = linear(totals, _HEIGHT - BOTTOM, TOP)
    draw_frame(drawing, time, upward, "time (s)", y_label)
    for place in range(bins):
        start_s, stop_s = end_s * place / bins, end_s * (place + 1) / bins
        left, right = time.place(start_s), time.place(stop_s)
        below = 0.0
        for series, (name, column) in enumerate(counts.items()):
            if not column[place]:
                continue
            low, high = upward.place(below), upward.place(below + column[place])
            title = f"{name}: {column[place]} from {start_s:.4g} to {stop_s:.4g} s"
            drawing.rect(left, high, max(right - left - 1, 1), low - high, f"f{series % PALETTE}", title)
            below += column[place]
    return drawing.render()
