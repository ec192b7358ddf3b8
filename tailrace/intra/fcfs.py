"""First come, first served: vLLM's order."""

from __future__ import annotations

from tailrace.intra.base import WATERMARK, IntraPolicy, JobView, Rank


class Fcfs(IntraPolicy):
    """Decodes first, then prompts in order of arrival, with chunked prefill.

    Admission stops at the first request that finds no room; when the KV of running requests outgrows the
    device, the last to arrive is preempted, and returns before any later one is admitted (PASCAL, sections
    II-C and V-A).
    """

    parameters = (WATERMARK,)
    summary = "arrival order; preempts the last when KV is short"

    def __init__(self, *, watermark: float = 0.01) -> None:
        """`watermark`: share of KV blocks that an admission leaves free."""
        self.watermark = watermark

    def rank(self, job: JobView) -> Rank:
        """By arrival alone."""
        return (job.arrival,)
