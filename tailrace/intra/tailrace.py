"""Our own order: answers first, then prompts and reasoning in turns (docs/policy-tailrace.md)."""

from __future__ import annotations

from typing import Final

from tailrace.cluster import Phase
from tailrace.intra.base import PASS_OVER, QUANTUM, QUANTUM_TOKENS, WATERMARK, IntraPolicy, JobView, Rank
from tailrace.intra.due import due_s
from tailrace.policy.parameters import Parameter

ANSWERS: Final = 0
# As far as ARES looks ahead, and its "2000 tokens" (section 5.3).
PROTECTED_TOKENS: Final = 2_048


class AnswersFirst(IntraPolicy):
    """PASCAL's phases and quanta with Arrow's decode-first, where the two disagree.

    PASCAL puts reasoning above answering, since an answer is read more slowly than it is made. That holds
    while answers do get their turn. Once reasoning alone fills the memory they do not, and a request that
    has nearly ended keeps the KV of all its reasoning. Decode-first says the reverse: what a reader waits
    for goes before what nobody reads yet. So answers go first here, and nobody is preempted while being
    read, for `protected_tokens`. Most answers end before; whoever goes on has by then a store of tokens that
    the reader has not reached, and takes turns with the others, which is PASCAL's reason again. Turns are
    PASCAL's: one quantum, fewest quanta used first, so that a short reasoning need not wait for a long one.
    A plain request has nothing to read until its first token and is read from then on, so that for plain
    models with answers of usual length this is decode-first. Where prompts queue, a short one overtakes a
    long one that came not long before (`due`).
    """

    parameters = (
        QUANTUM,
        Parameter(
            "protected_tokens",
            int,
            PROTECTED_TOKENS,
            "output tokens of an answer during which it is not preempted",
            unit="tokens",
            source="ours; as far as ARES looks ahead (section 5.3)",
            minimum=0,
        ),
        WATERMARK,
        PASS_OVER,
    )
    summary = "answers before prompts and reasoning, those and very long answers in turns of one quantum"
    preemptive = True

    def __init__(
        self,
        *,
        quantum_tokens: int = QUANTUM_TOKENS,
        protected_tokens: int = PROTECTED_TOKENS,
        watermark: float = 0.01,
        pass_over: float = 0.0,
    ) -> None:
        """`quantum_tokens`: PASCAL's."""
        if quantum_tokens < 1 or protected_tokens < 0:
            raise ValueError(f"no turns of {quantum_tokens} tokens after {protected_tokens}")
        self.quantum_tokens = quantum_tokens
        self.protected_tokens = protected_tokens
        self.watermark = watermark
        self.pass_over = pass_over

    def rank(self, job: JobView) -> Rank:
        """(answers, then by quanta used up in the phase; when it was due; arrival)."""
        if self._protected(job):
            return (ANSWERS, _whole_us(job.arrived_s), job.arrival)
        if job.phase is Phase.PREFILL:
            return (1, _whole_us(due_s(job.arrived_s, job.prompt_tokens, job.queue_s)), job.arrival)
        return (1 + job.phase_tokens // self.quantum_tokens, _whole_us(job.arrived_s), job.arrival)

    def level(self, rank: Rank) -> Rank:
        """A prompt overtakes, but what another has computed is not thrown away for it."""
        return rank[:1]

    def rank_holds(self, job: JobView) -> int:
        """Until the quantum, or the protection, ends."""
        if self._protected(job):
            return self.protected_tokens - job.phase_tokens
        return self.quantum_tokens - job.phase_tokens % self.quantum_tokens

    def _protected(self, job: JobView) -> bool:
        return job.phase is Phase.ANSWERING and job.phase_tokens < self.protected_tokens


def _whole_us(seconds: float) -> int:
    return round(seconds * 1e6)
