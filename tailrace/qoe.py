"""Token pacing and QoE (PASCAL, section II-C, figure 3, and V-A; the definition is Andes', arXiv 2404.16283).

The pacer shows a user one token every `tpot_s` at most: token k, ready at g(k), is digested at
d(k) = max(g(k), d(k-1) + tpot_s). The user expects token k at e(k) = e(1) + (k - 1) tpot_s. QoE is the area
under the digested-tokens curve over the area under the expected one, both step functions, until the last
token is digested. PASCAL counts from the first answering token on, that is with e(1) = g(1).

Tokens are given as runs of evenly spaced ones, and everything here costs time by runs, not by tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRun:
    """`count` tokens, the first ready at `first_s`, each further one `interval_s` later."""

    first_s: float
    interval_s: float
    count: int


@dataclass(frozen=True, slots=True)
class PacerState:
    """A pacer's state, to continue elsewhere. Times in seconds; `digested_*` count from `first_s`."""

    ready: int
    first_s: float
    # When the last token is digested, and the sum over all tokens of when they are.
    digested_s: float
    digested_sum_s: float


class TokenPacer:
    """The pacer of one stream. Runs must be added in order of time."""

    __slots__ = ("_sum_s", "digested_until_s", "first_s", "ready", "tpot_s")

    def __init__(self, tpot_s: float) -> None:
        """`tpot_s`: the user's pace in seconds per token. Raise ValueError unless it is positive."""
        if not tpot_s > 0.0:
            raise ValueError(f"a pace is more than 0 seconds a token, not {tpot_s}")
        self.tpot_s = tpot_s
        # Tokens ready so far.
        self.ready = 0
        self.first_s = 0.0
        # When the last of them is digested.
        self.digested_until_s = -math.inf
        # Sum of the times since first_s at which they are digested.
        self._sum_s = 0.0

    def state(self) -> PacerState:
        """Return the state, to continue elsewhere; only once a token is ready."""
        return PacerState(self.ready, self.first_s, self.digested_until_s - self.first_s, self._sum_s)

    def resume(self, state: PacerState) -> None:
        """Continue from a state; `first_s` on the clock of the following runs."""
        self.ready, self.first_s, self._sum_s = state.ready, state.first_s, state.digested_sum_s
        self.digested_until_s = state.first_s + state.digested_s

    def add(self, run: TokenRun) -> None:
        """Add tokens that have become ready."""
        count = run.count
        if count < 1:
            return
        pace = self.tpot_s
        if not self.ready:
            self.first_s = run.first_s
        self.ready += count
        first = max(run.first_s, self.digested_until_s + pace)
        paced = count
        excess = run.interval_s - pace
        if excess > 0.0:
            # The user reads buffered tokens, one every `pace`, until the run's own tokens come later than
            # that.
            paced = min(count, max(1, math.ceil((first - run.first_s) / excess)))
        self._sum_s += (first - self.first_s) * paced + pace * (paced * (paced - 1) / 2)
        last = first + pace * (paced - 1)
        starved = count - paced
        if starved:
            begin = run.first_s + run.interval_s * paced
            self._sum_s += (begin - self.first_s) * starved + run.interval_s * (starved * (starved - 1) / 2)
            last = begin + run.interval_s * (starved - 1)
        self.digested_until_s = last

    def slack_tokens(self, now_s: float) -> float:
        """Return the tokens ready beyond what the user expects to have read by now; negative: behind.

        0.0 before the first token.
        """
        if not self.ready:
            return 0.0
        return slack_tokens(self.ready, now_s - self.first_s, self.tpot_s)

    def qoe(self, expected_first_s: float | None = None) -> float:
        """Return the QoE in (0, 1]; `expected_first_s`: when the user expected the first token (None: when it
        came).

        A stream ahead of the expectation is not better than perfect. 1.0 for an empty one.
        """
        count = self.ready
        if not count:
            return 1.0
        late_s = 0.0 if expected_first_s is None else max(0.0, self.first_s - expected_first_s)
        end_s = self.digested_until_s - self.first_s
        expected = (end_s + late_s) * count - self.tpot_s * (count * (count - 1) / 2)
        if expected <= 0.0:
            return 1.0
        return min(1.0, max(0.0, end_s * count - self._sum_s) / expected)


def slack_tokens(ready: int, since_first_s: float, tpot_s: float) -> float:
    """Return the tokens ready beyond those that a user expects `since_first_s` seconds after the first
    token."""
    return ready - (since_first_s / tpot_s + 1.0)


def qoe(runs: Iterable[TokenRun], tpot_s: float, expected_first_s: float | None = None) -> float:
    """Return the QoE of a whole stream; see TokenPacer.qoe."""
    pacer = TokenPacer(tpot_s)
    for run in runs:
        pacer.add(run)
    return pacer.qoe(expected_first_s)
