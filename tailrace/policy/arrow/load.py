"""Arrow's load metrics (section 5.3, "Instance Load Evaluation")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.cluster import InstanceView
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.requests import table_of


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Compute an instance's loads from its view and its profile.

    `ttft`, `max_running_tokens`: for instances that have not been measured and report none.
    """

    ttft: TtftPredictor
    max_running_tokens: int

    def prefill_s(self, instance: InstanceView, tokens: int) -> float:
        """Return the seconds to prefill a prompt of this length there."""
        measured = instance.measured
        return (self.ttft if measured is None else measured.ttft).prefill_s(tokens)

    def saved_s(self, instance: InstanceView, cached_tokens: int) -> float:
        """Return the prefill seconds saved there if the first `cached_tokens` of a prompt are cached."""
        measured = instance.measured
        return (self.ttft if measured is None else measured.ttft).saved_s(cached_tokens)

    def prefill_delay_s(self, instance: InstanceView) -> float:
        """Return the seconds until a prompt that arrives now would start: as reported, else from the
        backlog."""
        if instance.prefill_delay_s is not None:
            return instance.prefill_delay_s
        measured = instance.measured
        # Counts the waiting prompts; a partly prefilled one is not waiting, and is counted by its tokens.
        return (self.ttft if measured is None else measured.ttft).backlog_s(
            instance.prefill_backlog_tokens, instance.waiting
        )

    def max_tokens(self, instance: InstanceView) -> int:
        """Return Max Running Tokens of Alg. 2: as reported, else as profiled; at most the KV capacity."""
        limit = instance.max_running_tokens
        if limit is None:
            limit = self.max_running_tokens
        return min(limit, instance.kv_capacity_tokens)


def running_tokens(instance: InstanceView) -> int:
    """Return the decode load: the context tokens of all requests on the instance and migrating to it."""
    return instance.context_tokens + instance.coming_tokens


def has_prefills_left(instance: InstanceView) -> bool:
    """Return whether the instance has unfinished prefill work."""
    return instance.prefill_backlog_tokens > 0


def has_decodes_left(instance: InstanceView) -> bool:
    """Return whether the instance has requests past prefill that are not already leaving.

    Read the requests only if the counts do not decide it.
    """
    if instance.running == 0 and instance.waiting == 0:
        return False
    return bool(table_of(instance.requests).decoding.any())


def mean_token_interval_s(instances: Sequence[InstanceView]) -> float:
    """Return the mean recent token interval of the instances that run requests (section 5.5, case 2); 0 if
    none does."""
    intervals = [i.token_interval_s for i in instances if i.running > 0]
    return sum(intervals) / len(intervals) if intervals else 0.0
