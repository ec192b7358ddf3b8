"""An order in which a short prompt overtakes every longer one."""

from __future__ import annotations

from tailrace.intra.base import IntraPolicy, JobView, Rank


class ByLength(IntraPolicy):
    """Shortest prompt first."""

    def rank(self, job: JobView) -> Rank:
        return (job.prompt_tokens, job.arrival)
