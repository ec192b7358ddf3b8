"""First come, first served: vLLM's order."""

from __future__ import annotations

from tailrace.intra.base import PASS_OVER, WATERMARK, IntraPolicy, JobView, Rank


class Fcfs(IntraPolicy):
    """Decodes first, then prompts in order of arrival, with chunked prefill.

    Admission stops at the first request that finds no room; when the KV of running requests outgrows the
    device, the last to arrive is preempted, and returns before any later one is admitted (PASCAL, sections
    II-C and V-A). With `pass_over` above 0 it is no longer vLLM's order.
    """

    parameters = (WATERMARK, PASS_OVER)
    summary = "arrival order; preempts the last when KV is short"

    def __init__(self, *, watermark: float = 0.01, pass_over: float = 0.0) -> None:
        """See `parameters`."""
        self.watermark = watermark
        self.pass_over = pass_over

    def rank(self, job: JobView) -> Rank:
        """By arrival alone."""
        return (job.arrival,)
