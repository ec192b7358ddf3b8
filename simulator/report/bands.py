"""Length stages and their boundaries over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from simulator.records import StageChange
from simulator.report.frame import BOTTOM, INNER_END, INNER_START, TOP, WIDTH, draw_frame
from simulator.report.scale import Scale, tick_text, within
from simulator.report.svg import PALETTE, Drawing
from tailrace.cluster import Stage

_HEIGHT: Final = 300.0
# Lengths are drawn on a logarithmic axis, which has no 0.
_SHORTEST: Final = 64


def stage_chart(changes: Sequence[StageChange], end_s: float) -> str:
    """A band a stage, with the number of its instances; none where there are no stages."""
    drawing = Drawing(WIDTH, _HEIGHT, "length stages over time")
    longest = max((stage.hi for change in changes for stage in change.stages), default=_SHORTEST * 2)
    time = within(0.0, end_s, INNER_START, INNER_END)
    length = Scale(_SHORTEST, max(longest, _SHORTEST * 2), _HEIGHT - BOTTOM, TOP, True)
    draw_frame(drawing, time, length, "time (s)", "context (tokens)")
    ends = [*(change.at_s for change in changes[1:]), end_s]
    for change, until_s in zip(changes, ends, strict=True):
        for place, stage in enumerate(change.stages):
            _band(drawing, time, length, change.at_s, until_s, place, stage)
    return drawing.render()


def _band(
    drawing: Drawing, time: Scale, length: Scale, start_s: float, end_s: float, place: int, stage: Stage
) -> None:
    left, right = time.place(start_s), time.place(end_s)
    low, high = length.place(max(stage.lo, _SHORTEST)), length.place(stage.hi)
    count = len(stage.instance_ids)
    range_ = f"{tick_text(stage.lo)} to {tick_text(stage.hi)} tokens"
    title = f"{range_}: {', '.join(stage.instance_ids)} from {start_s:.4g} s"
    drawing.rect(left, high, right - left, low - high, f"soft f{place % PALETTE}", title)
    drawing.line(left, high, right, high, f"path s{place % PALETTE}")
    if right - left > 60 and low - high > 16:
        words = f"{count} instance{'' if count == 1 else 's'}"
        drawing.text((left + right) / 2, (low + high) / 2 + 4.5, words, anchor="middle")
