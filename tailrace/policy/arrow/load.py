"""How Arrow measures load (section 5.3, "Instance Load Evaluation")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.cluster import InstanceView, Phase
from tailrace.perf.ttft import TtftPredictor


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Loads of an instance, from its view and what was profiled."""

    ttft: TtftPredictor
    max_running_tokens: int

    def prefill_s(self, instance: InstanceView, tokens: int) -> float:
        """Seconds that a prompt of this length takes there: as measured of it, else as profiled."""
        measured = instance.measured
        return (self.ttft if measured is None else measured.ttft).prefill_s(tokens)

    def found_s(self, instance: InstanceView, cached_tokens: int) -> float:
        """Seconds that a prompt takes less there if so many of its first tokens are cached."""
        measured = instance.measured
        return (self.ttft if measured is None else measured.ttft).computed_s(cached_tokens)

    def prefill_delay_s(self, instance: InstanceView) -> float:
        """Seconds until a prefill that arrives now would start: as reported, else from the backlog."""
        if instance.prefill_delay_s is not None:
            return instance.prefill_delay_s
        measured = instance.measured
        # A backlog of whole prompts waits; one of which a part is done is one more.
        return (self.ttft if measured is None else measured.ttft).backlog_s(
            instance.prefill_backlog_tokens, instance.waiting
        )

    def most_tokens(self, instance: InstanceView) -> int:
        """Max Running Tokens of Alg. 2: as reported, else as profiled; never more than its KV holds."""
        most = instance.max_running_tokens
        if most is None:
            most = self.max_running_tokens
        return min(most, instance.kv_capacity_tokens)


def running_tokens(instance: InstanceView) -> int:
    """The decode load: tokens of all requests on the instance, and of those on their way or in line there."""
    return instance.context_tokens + instance.coming_tokens


def prefills_left(instance: InstanceView) -> bool:
    """It has prefill work that is not done."""
    return instance.prefill_backlog_tokens > 0


def decodes_left(instance: InstanceView) -> bool:
    """It has requests past prefill, other than those already leaving.

    Asks the requests only where the counts do not settle it.
    """
    if instance.running == 0 and instance.waiting == 0:
        return False
    return any(r.phase is not Phase.PREFILL and not r.migrating for r in instance.requests)


def mean_token_interval_s(instances: Sequence[InstanceView]) -> float:
    """Mean recent token interval of those that run anything; 0: none does (section 5.5, case 2)."""
    intervals = [i.token_interval_s for i in instances if i.running > 0]
    return sum(intervals) / len(intervals) if intervals else 0.0
