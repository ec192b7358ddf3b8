"""Our own order: earliest due first, whatever the phase (docs/policy-tailrace.md)."""

from __future__ import annotations

from typing import Final

from tailrace.cluster import Phase
from tailrace.intra.base import PASS_OVER, WATERMARK, IntraPolicy, JobView, Rank
from tailrace.intra.due import due_s
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Parameter
from tailrace.slo import DEFAULT_TTFT_S, READING_S

LEAD_S: Final = 20.0
LATE_S: Final = 60.0
# Output tokens for which a rank holds: at the usual pace five seconds, a quarter of the lead.
RANK_TOKENS: Final = 50
PROMPT: Final = 0
DECODING: Final = 1


class EarliestDue(IntraPolicy):
    """Everybody is served by when their next token is due.

    An answer's next token is due when its reader comes to it: `pace_s` for each token since the answer began.
    A reasoning's is due as if a plain answer had begun in time. A prompt is due when its first token is, and
    later by what it yields to shorter ones (`due`). So who is behind goes before who is ahead, and what is
    made faster than it is read waits for what is not.

    Whoever waits for KV may take it from those that are due `lead_s` later than they are, the latest first.
    An answer that has got so far ahead yields, and comes back before its reader has caught up. The lead is
    far above what two swaps cost, so that KV does not go to and fro. What is computed of a prompt is never
    thrown away for another request.

    A prompt that waits and cannot keep its SLO any more is due anew, `late_s` later. Served in its turn it
    would make others late that can still be in time, and those the next: once a queue is as long as the SLO,
    nobody would keep it. It comes before all that arrive `late_s` after it and so does not starve.
    """

    parameters = (
        Parameter(
            "lead_s",
            float,
            LEAD_S,
            "how much later a running request's next token must be due than that of a request waiting for "
            "KV, for the running one to be preempted",
            unit="s",
            source="ours",
            minimum=0.0,
        ),
        Parameter(
            "late_s",
            float,
            LATE_S,
            "how long a waiting prompt that has missed the TTFT SLO is postponed",
            unit="s",
            source="ours",
            minimum=0.0,
        ),
        WATERMARK,
        PASS_OVER,
    )
    needs = (Fact.TTFT_SLO, Fact.PACE)
    summary = "by when the next token is due; requests far ahead of their reader yield KV; late prompts last"
    preemptive = True

    def __init__(
        self,
        *,
        lead_s: float = LEAD_S,
        late_s: float = LATE_S,
        watermark: float = 0.01,
        pass_over: float = 0.0,
        ttft_slo_s: float = DEFAULT_TTFT_S,
        pace_s: float = READING_S,
    ) -> None:
        """See `parameters`. `pace_s`: seconds a token at which users read."""
        self.watermark = watermark
        self.pass_over = pass_over
        self._lead_us = _whole_us(lead_s)
        self._late_s = late_s
        self._ttft_slo_s = ttft_slo_s
        self._pace_s = pace_s

    def rank(self, job: JobView) -> Rank:
        """(when it is due, in microseconds; whether it decodes; arrival)."""
        if job.phase is Phase.PREFILL:
            due = due_s(job.arrived_s, job.prompt_tokens, job.queue_s)
            if job.lapsed:
                due = max(due, job.arrived_s + self._late_s)
            return (_whole_us(due + self._ttft_slo_s), PROMPT, job.arrival)
        begun_s = job.answering_s if job.phase is Phase.ANSWERING else job.arrived_s + self._ttft_slo_s
        read_s = self._pace_s * (job.phase_tokens - job.phase_tokens % RANK_TOKENS)
        return (_whole_us(begun_s + read_s), DECODING, job.arrival)

    def level(self, rank: Rank) -> Rank:
        """All are of one."""
        return ()

    def takes_from(self, rank: Rank, victim: Rank) -> bool:
        """A prompt overtakes, but what another has computed is not thrown away for it."""
        return victim[1] == DECODING and victim[0] > rank[0] + self._lead_us

    def rank_holds(self, job: JobView) -> int:
        """A few tokens."""
        return RANK_TOKENS - job.phase_tokens % RANK_TOKENS

    def lapses_s(self, job: JobView) -> float | None:
        """When a prompt has missed its SLO."""
        return job.arrived_s + self._ttft_slo_s if job.phase is Phase.PREFILL else None


def _whole_us(seconds: float) -> int:
    return round(seconds * 1e6)
