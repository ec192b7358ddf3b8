"""Our own batch order: earliest due first, in all phases (docs/policy-tailrace.md)."""

from __future__ import annotations

from typing import Final

from tailrace.cluster import Phase
from tailrace.intra.base import PASS_OVER, WATERMARK, IntraPolicy, JobView, Rank
from tailrace.intra.due import due_s
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value, parameter
from tailrace.slo import DEFAULT_TTFT_S, READING_S

LEAD_S: Final = 20.0
LATE_S: Final = 60.0
# Output tokens for which a rank is valid: five seconds at the default pace, a quarter of the lead.
RANK_TOKENS: Final = 50
PROMPT: Final = 0
DECODING: Final = 1


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

    A waiting prompt that has missed its SLO is postponed by `late_s`. Served in turn it would delay others
    that can still meet their SLOs, and those the next: once the queue is as long as the SLO, no prompt would
    meet it. It still precedes all prompts that arrive `late_s` after it, so it does not starve.
    """

    lead_s: float = parameter(
        LEAD_S,
        "how much later a running request's next token must be due than that of a request waiting for "
        "KV, for the running one to be preempted",
        unit="s",
        minimum=0.0,
    )
    late_s: float = parameter(
        LATE_S, "how long a waiting prompt that has missed the TTFT SLO is postponed", unit="s", minimum=0.0
    )
    watermark: float = WATERMARK
    pass_over: float = PASS_OVER
    needs = (Fact.TTFT_SLO, Fact.PACE)
    summary = "by when the next token is due; requests far ahead of their reader yield KV; late prompts last"
    preemptive = True

    def __init__(
        self,
        *,
        ttft_slo_s: float = DEFAULT_TTFT_S,
        pace_s: float = READING_S,
        **parameters: Value,
    ) -> None:
        """`pace_s`: users' reading pace, in seconds per token."""
        super().__init__(**parameters)
        self._lead_us = _whole_us(self.lead_s)
        self._ttft_slo_s = ttft_slo_s
        self._pace_s = pace_s

    def rank(self, job: JobView) -> Rank:
        """Return (due time in microseconds, PROMPT or DECODING, arrival)."""
        if job.phase is Phase.PREFILL:
            due = due_s(job.arrived_s, job.prompt_tokens, job.queue_s)
            if job.lapsed:
                due = max(due, job.arrived_s + self.late_s)
            return (_whole_us(due + self._ttft_slo_s), PROMPT, job.arrival)
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

    def rank_holds(self, job: JobView) -> int:
        """Return the tokens to the next multiple of RANK_TOKENS."""
        return RANK_TOKENS - job.phase_tokens % RANK_TOKENS

    def lapses_s(self, job: JobView) -> float | None:
        """Return the time at which a prompt misses the TTFT SLO."""
        return job.arrived_s + self._ttft_slo_s if job.phase is Phase.PREFILL else None


def _whole_us(seconds: float) -> int:
    return round(seconds * 1e6)
