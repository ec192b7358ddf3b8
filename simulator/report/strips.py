"""Charts of one row an instance over time: how full it is, in which pool it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from simulator.report.frame import INNER_END, INNER_START, WIDTH, draw_x_axis
from simulator.report.scale import within
from simulator.report.svg import Drawing

_AXIS: Final = 52.0
# Rows get thinner the more there are, and names are left out where they would not fit.
_ROW: Final = ((12, 19.0), (32, 11.0), (64, 6.0), (10**9, 3.0))
_NAME: Final = 12.0


@dataclass(frozen=True, slots=True)
class Span:
    """Something that is so from `start_s` to `end_s`; `kind`: class of its colour; `title`: in words."""

    start_s: float
    end_s: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Row:
    """One instance."""

    name: str
    spans: Sequence[Span]


def strip_chart(label: str, rows: Sequence[Row], end_s: float) -> str:
    """The picture; time from 0 to `end_s`."""
    height = next(size for most, size in _ROW if len(rows) <= most)
    bottom = 6.0 + height * len(rows)
    drawing = Drawing(WIDTH, bottom + _AXIS, label)
    time = within(0.0, end_s, INNER_START, INNER_END)
    named = max(1, round(_NAME / height))
    for place, row in enumerate(rows):
        top = 6.0 + place * height
        if place % named == 0:
            drawing.text(INNER_START - 8, top + height / 2 + 4.5, row.name, anchor="end")
        for span in row.spans:
            start, end = time.place(span.start_s), time.place(span.end_s)
            gap = 1.0 if height > 4 else 0.0
            drawing.rect(start, top, end - start, height - gap, span.kind, f"{row.name}: {span.title}")
    draw_x_axis(drawing, time, bottom, "time (s)")
    return drawing.render()
