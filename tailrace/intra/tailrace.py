"""Our own order: answers first, then prompts and reasoning in turns (docs/policy-tailrace.md)."""

from __future__ import annotations

from typing import Final

from tailrace.cluster import Phase
from tailrace.intra.base import QUANTUM_TOKENS, IntraPolicy, JobView, Rank

ANSWERS: Final = 0


class AnswersFirst(IntraPolicy):
    """PASCAL's phases and quanta with Arrow's decode-first, where the two disagree.

    PASCAL puts reasoning above answering, since an answer is read more slowly than it is made. That holds
    while answers do get their turn. Once reasoning alone fills the memory they do not, and a request that
    has nearly ended keeps the KV of all its reasoning. Decode-first says the reverse: what a reader waits
    for goes before what nobody reads yet. So answers go first here, and nobody is preempted while being
    read; among those that nobody reads yet it is PASCAL's turns of one quantum, fewest quanta used first,
    so that a short reasoning need not wait for a long one. A plain request has nothing to read until its
    first token and is read from then on, so that for plain models this is decode-first.
    """

    summary = "answers before prompts and reasoning, those in turns of one quantum"
    preemptive = True

    def __init__(self, *, quantum_tokens: int = QUANTUM_TOKENS, watermark: float = 0.01) -> None:
        """`quantum_tokens`: PASCAL's; `watermark`: share of KV blocks that an admission leaves free."""
        if quantum_tokens < 1:
            raise ValueError(f"a quantum has at least one token, not {quantum_tokens}")
        self.quantum_tokens = quantum_tokens
        self.watermark = watermark

    def rank(self, job: JobView) -> Rank:
        """(answers, then by quanta used up; arrival)."""
        if job.phase is Phase.ANSWERING:
            return (ANSWERS, job.arrival)
        return (1 + job.phase_tokens // self.quantum_tokens, job.arrival)

    def rank_holds(self, job: JobView) -> int | None:
        """Until the quantum ends; an answer's for good."""
        if job.phase is Phase.ANSWERING:
            return None
        return self.quantum_tokens - job.phase_tokens % self.quantum_tokens
