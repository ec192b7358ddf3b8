"""PASCAL's hierarchical queue (section IV-C): reasoning above answering, round robin in each."""

from __future__ import annotations

from typing import Final

from tailrace.cluster import Phase
from tailrace.intra.base import PASS_OVER, QUANTUM, WATERMARK, IntraPolicy, JobView, Rank
from tailrace.policy.parameters import Value, parameter

HIGH: Final = 0
LOW: Final = 1
# Section V-A.
DEMOTION_TOKENS: Final = 5_000


class PascalQueue(IntraPolicy):
    """Prefill and reasoning in the high-priority queue, answering and demoted reasoning in the low-priority
    one.

    The paper leaves open whether quanta carry over when a request changes queue. Here they start at zero:
    Algorithm 2 calls an answering request fresh that "has not exhausted the first time quantum", which would
    never be the case if its reasoning counted. The same applies to a demoted request, which is "effectively
    treated as a low-priority answering request".
    """

    quantum_tokens: int = QUANTUM
    # None: never.
    demotion_tokens: int | None = parameter(
        DEMOTION_TOKENS,
        "context length above which a reasoning request is demoted to the low-priority queue",
        unit="tokens",
        source="PASCAL, section V-A",
        minimum=1,
    )
    watermark: float = WATERMARK
    pass_over: float = PASS_OVER
    summary = "reasoning before answering, quanta in each, long reasoning demoted"
    preemptive = True
    # Without room on the device an answering request spills "its KV cache to CPU memory" (on Algorithm 2).
    receives_on_host = True

    def __init__(self, **parameters: Value | None) -> None:
        super().__init__(**parameters)
        if self.quantum_tokens < 1:
            raise ValueError(f"a quantum has at least one token, not {self.quantum_tokens}")

    def rank(self, job: JobView) -> Rank:
        """Return (queue, quanta used up in it, arrival)."""
        queue, used = self._turn(job)
        return (queue, used // self.quantum_tokens, job.arrival)

    def rank_holds(self, job: JobView) -> int:
        """Return the tokens until the quantum ends or the request is demoted."""
        queue, used = self._turn(job)
        remaining = self.quantum_tokens - used % self.quantum_tokens
        if queue == HIGH and self.demotion_tokens is not None:
            remaining = min(remaining, self.demotion_tokens + 1 - job.context_tokens)
        return remaining

    def demoted(self, job: JobView) -> bool:
        """Return whether the request is reasoning beyond `demotion_tokens`; a long prompt alone does not
        demote."""
        return (
            job.phase is Phase.REASONING
            and self.demotion_tokens is not None
            and job.context_tokens > self.demotion_tokens
        )

    def _turn(self, job: JobView) -> tuple[int, int]:
        """Return the job's queue, and its output tokens since it entered that queue."""
        if self.demoted(job):
            assert self.demotion_tokens is not None
            entered = max(0, self.demotion_tokens + 1 - job.prompt_tokens)
            return LOW, job.output_tokens - entered
        return (LOW if job.phase is Phase.ANSWERING else HIGH), job.phase_tokens
