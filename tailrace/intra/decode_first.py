"""Arrow's local scheduler (section 5.4)."""

from __future__ import annotations

from tailrace.cluster import Phase
from tailrace.intra.base import PASS_OVER, WATERMARK, IntraPolicy, JobView, Rank


class DecodeFirst(IntraPolicy):
    """Decode requests first, chunked prefill in what is left of the step, KV migrations in FCFS order.

    Decode-first holds for memory too: a request that is decoding or wants to go on decoding ranks before
    every prompt, so that a prompt is what gives way when KV is short. Nobody is preempted for an admission.
    """

    parameters = (WATERMARK, PASS_OVER)
    summary = "decodes before prompts, chunked prefill in the rest, KV migrations in order"

    def __init__(self, *, watermark: float = 0.01, pass_over: float = 0.0) -> None:
        """See `parameters`."""
        self.watermark = watermark
        self.pass_over = pass_over

    def rank(self, job: JobView) -> Rank:
        """(prefill after decode, arrival)."""
        return (1 if job.phase is Phase.PREFILL else 0, job.arrival)
