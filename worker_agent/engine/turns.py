"""A request's rank on its instance, asked of the intra-instance policy only when it may have changed."""

from __future__ import annotations

from typing import Final

from tailrace.cluster import Phase
from tailrace.intra.base import IntraPolicy, JobView, Rank
from tailrace.intra.due import nominal_s

_NEVER: Final = 1 << 62
_NUMBERS: Final = 1 << 20


def arrival_order(arrival_s: float, number: int) -> int:
    """JobView.arrival: by the time at which the API server took the request, so that it survives a migration;
    `number` tells apart those of one microsecond."""
    return round(arrival_s * 1e6) * _NUMBERS + number % _NUMBERS


def arrived_s(arrival: int) -> float:
    """The time that `arrival_order` was given, to the microsecond."""
    return arrival // _NUMBERS / 1e6


def serving_phase(output_tokens: int, reasons: bool) -> Phase:
    """The phase that an order goes by. `reasons`: the next token belongs to the reasoning.

    A request whose KV is to be computed anew is in the phase that it was in: it is served as what it is.
    """
    if not output_tokens:
        return Phase.PREFILL
    return Phase.REASONING if reasons else Phase.ANSWERING


def left_s(total_tokens: int, computed_tokens: int) -> float:
    """Prefill that a request still asks for, as JobView.queue_s has it; all but one token computed: none."""
    if total_tokens - computed_tokens <= 1:
        return 0.0
    squares = total_tokens * total_tokens - computed_tokens * computed_tokens
    return nominal_s(total_tokens - computed_tokens, squares)


def view_of(
    turn: Turn, reasons: bool, prompt_tokens: int, output_tokens: int, reasoning_tokens: int
) -> JobView:
    """A request as an intra-instance policy sees it."""
    phase = serving_phase(output_tokens, reasons)
    in_phase = output_tokens - reasoning_tokens if phase is Phase.ANSWERING else output_tokens
    arrival = turn.arrival
    came_s = arrived_s(arrival)
    return JobView(
        arrival,
        phase,
        prompt_tokens,
        output_tokens,
        in_phase,
        came_s,
        turn.queue_s,
        turn.answering_s or came_s,
        turn.lapsed,
    )


class Turn:
    """One request's place in the order: `rank`, once it was asked for."""

    __slots__ = (
        "_phase",
        "_policy",
        "_until",
        "answering_s",
        "arrival",
        "lapsed",
        "passed_blocks",
        "queue_s",
        "rank",
    )

    def __init__(self, arrival: int, queue_s: float = 0.0) -> None:
        """`queue_s`: as JobView has it."""
        self.arrival = arrival
        self.queue_s = queue_s
        # As JobView has them; 0: it has not begun to answer.
        self.answering_s = 0.0
        self.lapsed = False
        # As `tailrace.intra.allocate.Claim` has it.
        self.passed_blocks = 0
        self.rank: Rank = ()
        self._until = 0
        self._phase: Phase | None = None
        self._policy: IntraPolicy | None = None

    def answers(self, now_s: float, for_s: float = 0.0) -> None:
        """It has begun to answer, so many seconds before now (seconds since the epoch). Once is enough."""
        if not self.answering_s:
            self.answering_s = now_s - for_s

    def lapse(self) -> None:
        """The time that `IntraPolicy.lapses_s` gave has come: the rank is to be asked anew."""
        self.lapsed = True
        self._until = 0

    def holds(self, policy: IntraPolicy, phase: Phase, output_tokens: int) -> bool:
        """Whether `rank` is still what `policy` would say."""
        return output_tokens < self._until and phase is self._phase and policy is self._policy

    def ask(self, policy: IntraPolicy, job: JobView) -> None:
        """Rank the request as it is now."""
        self.rank = policy.rank(job)
        holds = policy.rank_holds(job)
        self._until = _NEVER if holds is None else job.output_tokens + holds
        self._phase = job.phase
        self._policy = policy
