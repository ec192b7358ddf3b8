"""Our own batch order: earliest due first, in all phases (docs/policy-tailrace.md)."""

from __future__ import annotations

from typing import Final

from tailrace.cluster import Phase
from tailrace.intra.base import PASS_OVER, WATERMARK, IntraPolicy, JobView, Rank, TokenIntervals
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value, parameter
from tailrace.slo import DEFAULT_TPOT_S, DEFAULT_TTFT_S, READING_S

# The due time of a waiting prompt, by which the batch order `earliest_due` serves prompts.
#
# A shorter prompt may overtake a longer one if it arrives within a multiple of the longer one's prefill time:
# many short prompts keep their SLOs at the cost of the few long ones that would have made all of them late.
# That pays only under overload, so a prompt also yields no longer than in proportion to the time it would
# have taken anyway, behind the queue that it found; with short queues, prompts are served nearly in order of
# arrival. There is no starvation: a prompt's due time is fixed, while those of later arrivals move on.

# A prompt yields for at most this many times its own prefill. The SLOs of Arrow's table 1 are 80 to 105 times
# the prefill of their traces' mean prompt; with a quarter of 80, the mean prompt yields a quarter of its SLO,
# and a prompt of four times that length all of it.
PREFILLS: Final = 20.0
# A prompt yields for at most this many times its own prefill and that of the queue that it found. A smaller
# value shortens the tail, but fewer prompts meet their SLOs under overload: see docs/policy-tailrace.md.
STRETCH: Final = 2.0
# Prefill seconds of a prompt per token and per token squared: `llama-3.1-8b-h100` of `tailrace/profiles`. The
# order depends only on the ratio of the two, which differs little between dense models.
_PER_TOKEN_S: Final = 1.74934e-5
_PER_TOKEN_SQUARED_S: Final = 5.20357e-10


def nominal_s(tokens: int, squares: int) -> float:
    """Return the nominal prefill seconds of prompts with `tokens` in all, and the sum of squares `squares`.

    A prompt of n tokens that is computed up to token c has n - c tokens and n * n - c * c squares left.
    """
    return _PER_TOKEN_S * tokens + _PER_TOKEN_SQUARED_S * squares


def due_s(arrived_s: float, prompt_tokens: int, queue_s: float) -> float:
    """Return the due time of a prompt, in seconds on the clock of `arrived_s`. Earlier ones are served first.

    `queue_s`: nominal prefill seconds left on the instance when the prompt arrived there.
    """
    return arrived_s + due_after_s(nominal_s(prompt_tokens, prompt_tokens * prompt_tokens), queue_s)


def due_after_s(own_s: float, queue_s: float) -> float:
    """Return the seconds from arrival to due time of a prompt whose own prefill takes `own_s`."""
    return min(PREFILLS * own_s, STRETCH * (queue_s + own_s))


LEAD_S: Final = 20.0
# Output tokens for which a rank is valid: five seconds at the default pace, a quarter of the lead.
RANK_TOKENS: Final = 50
PROMPT: Final = 0
DECODING: Final = 1
LATE_PROMPT: Final = 2
LATE_S: Final = 60.0
# Both shared with the fleet's policy, which then knows which prompts wait.
LATE: Final = parameter(
    LATE_S, "how long a waiting prompt that can hardly meet the TTFT SLO is postponed", unit="s", minimum=0.0
)
TPOT_LIMIT: Final = parameter(
    0.95,
    "time between the tokens of an instance's requests above which its prompts wait, if the TPOT SLO is "
    "below its default and late_s above the TTFT SLO; 0: none wait",
    unit="of the TPOT SLO",
    minimum=0.0,
)
# Late prompts wait from this share of the limit on.
LATE_SHARE: Final = 0.63
# A TPOT SLO shorter than so many intervals of a small batch is not kept by a smaller one either.
_ATTAINABLE: Final = 2.0


def limits_tpot(tpot_limit: float, tpot_slo_s: float, late_s: float, ttft_slo_s: float) -> bool:
    """Return whether prompts ever wait because of `tpot_limit`.

    The default SLO is not an operator's choice: where it is too short for the machine, answers are slow and
    nobody waits. Nor do they where late prompts are not postponed: those that wait would become late, start
    at once, and make the next ones wait.
    """
    return tpot_limit > 0.0 and tpot_slo_s < DEFAULT_TPOT_S and late_s > ttft_slo_s


def waits(late: bool, mean_s: float, shortest_s: float, limit: float, tpot_slo_s: float) -> bool:
    """Return whether a prompt waits for tokens to come less than `limit` of the TPOT SLO apart, where
    `limits_tpot`.

    `late`: it was given up (`late_at_s`); `mean_s`, `shortest_s`: as in `TokenIntervals`.
    """
    return (
        mean_s > (LATE_SHARE if late else 1.0) * limit * tpot_slo_s and tpot_slo_s >= _ATTAINABLE * shortest_s
    )


def late_at_s(arrived_s: float, own_s: float, ttft_slo_s: float) -> float:
    """Return when a waiting prompt whose own prefill takes `own_s` is given up as late.

    It computes in steps that decode, too, and behind other prompts, which takes it half as long again. But
    much of it may be cached, or the machine faster than `nominal_s` says, so it has half of the SLO.
    """
    return arrived_s + max(0.5 * ttft_slo_s, ttft_slo_s - 1.5 * own_s)


class EarliestDue(IntraPolicy):
    """Serve requests in the order in which their next tokens are due.

    The next token of an answer is due when its user reads it: `pace_s` per token since the answer began. That
    of a reasoning phase is due as if a plain answer had begun in time. A prompt is due when its first token
    is, plus the time for which it yields to shorter prompts (`due`). So requests that are behind precede
    those that are ahead, and answers produced faster than they are read wait for the others.

    A request that waits for KV may preempt those due more than `lead_s` later than itself, the latest first.
    An answer that far ahead yields its KV and returns before its user has caught up. The lead is far above
    the cost of two swaps, so that KV does not thrash. A prompt's computed KV is never discarded for another
    request.

    A waiting prompt that can hardly meet its SLO any more is postponed by `late_s`. Served in turn it would
    delay others that can still meet theirs, and those the next: once the queue is as long as the SLO, no
    prompt would meet it. It still precedes all prompts that arrive `late_s` after it, so it does not starve.

    While the running requests are slower than the TPOT SLO, one more makes all of them miss it. So prompts
    wait while the time between tokens exceeds `tpot_limit` of the SLO. Those that are late wait from a
    shorter time on, so that others find room, until their turn comes. What cannot be served in time thus
    falls on a few, and not on all. Prompts do not wait where even the fastest second hardly kept the SLO.
    """

    lead_s: float = parameter(
        LEAD_S,
        "how much later a running request's next token must be due than that of a request waiting for "
        "KV, for the running one to be preempted",
        unit="s",
        minimum=0.0,
    )
    late_s: float = LATE
    tpot_limit: float = TPOT_LIMIT
    watermark: float = WATERMARK
    pass_over: float = PASS_OVER
    needs = (Fact.TTFT_SLO, Fact.TPOT_SLO, Fact.PACE)
    summary = "by when the next token is due; requests far ahead of their reader yield KV; late prompts last"
    preemptive = True

    def __init__(
        self,
        *,
        ttft_slo_s: float = DEFAULT_TTFT_S,
        tpot_slo_s: float = DEFAULT_TPOT_S,
        pace_s: float = READING_S,
        **parameters: Value,
    ) -> None:
        """`pace_s`: users' reading pace, in seconds per token."""
        super().__init__(**parameters)
        self._lead_us = _whole_us(self.lead_s)
        self._ttft_slo_s = ttft_slo_s
        self._tpot_slo_s = tpot_slo_s
        self.may_keep_back = limits_tpot(self.tpot_limit, tpot_slo_s, self.late_s, ttft_slo_s)
        self._late_kind = LATE_PROMPT if self.may_keep_back else PROMPT
        self._pace_s = pace_s

    def rank(self, job: JobView) -> Rank:
        """Return (due time in microseconds, PROMPT, LATE_PROMPT or DECODING, arrival)."""
        if job.phase is Phase.PREFILL:
            due = due_s(job.arrived_s, job.prompt_tokens, job.queue_s)
            kind = PROMPT
            if job.lapsed:
                due, kind = max(due, job.arrived_s + self.late_s), self._late_kind
            return (_whole_us(due + self._ttft_slo_s), kind, job.arrival)
        begun_s = job.answering_s if job.phase is Phase.ANSWERING else job.arrived_s + self._ttft_slo_s
        read_s = self._pace_s * (job.phase_tokens - job.phase_tokens % RANK_TOKENS)
        return (_whole_us(begun_s + read_s), DECODING, job.arrival)

    def level(self, rank: Rank) -> Rank:
        """Return the same level for all requests: `takes_from` decides about preemption."""
        return ()

    def takes_from(self, rank: Rank, victim: Rank) -> bool:
        """Return whether the victim decodes and is due more than the lead later; prompts are not
        preempted."""
        return victim[1] == DECODING and victim[0] > rank[0] + self._lead_us

    def keeps_back(self, rank: Rank, intervals: TokenIntervals) -> bool:
        """Return whether tokens come further apart than a prompt with this rank may make them, unless it is
        late and its turn has come."""
        due_us, kind, _ = rank
        late = kind == LATE_PROMPT
        if kind == DECODING or (late and due_us <= _whole_us(intervals.now_s + self._ttft_slo_s)):
            return False
        return waits(late, intervals.mean_s, intervals.shortest_s, self.tpot_limit, self._tpot_slo_s)

    def rank_holds(self, job: JobView) -> int:
        """Return the tokens to the next multiple of RANK_TOKENS."""
        return RANK_TOKENS - job.phase_tokens % RANK_TOKENS

    def lapses_s(self, job: JobView) -> float | None:
        """Return when a waiting prompt is given up as late."""
        if job.phase is not Phase.PREFILL:
            return None
        own_s = nominal_s(job.prompt_tokens, job.prompt_tokens * job.prompt_tokens)
        return late_at_s(job.arrived_s, own_s, self._ttft_slo_s)


def _whole_us(seconds: float) -> int:
    return round(seconds * 1e6)
