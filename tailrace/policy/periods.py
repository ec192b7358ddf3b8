"""Work that a policy does once a period, from ticks that come when they come.

A policy keeps no state, so it is told when its previous tick was (`ClusterView.last_tick_s`). Between two
ticks lie so many multiples of the period; over all ticks each multiple is counted exactly once, however late
a tick is.
"""

from __future__ import annotations

import math


def periods_elapsed(period_s: float, last_tick_s: float | None, now_s: float) -> int:
    """How many multiples of the period lie in (last_tick_s, now_s]; an infinite period never ends.

    Without a previous tick: 1, for when the work was last done is not known. A clock that was set back: 0.
    """
    if math.isinf(period_s):
        return 0
    if last_tick_s is None:
        return 1
    return max(0, math.floor(now_s / period_s) - math.floor(last_tick_s / period_s))
