"""The simulated scheduler's knowledge of prefixes: which instance holds them or is about to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from simulator.instance import Instance
from simulator.job import Job, JobState
from tailrace.cache.index import CacheIndex, Tier
from tailrace.cache.placed import PlacedPrefixes, cached_tokens
from tailrace.cluster import CachedTokens


class KnownPrefixes:
    """Track the prefixes of all instances, which serve one model."""

    def __init__(self, instances: Sequence[Instance], jobs: Mapping[str, Job]) -> None:
        self._instances = instances
        self._names = frozenset(instance.instance_id for instance in instances)
        self._jobs = jobs
        self._index = CacheIndex()
        self._placed = PlacedPrefixes()

    def record_placement(self, instance: Instance, names: Sequence[int], now_s: float) -> None:
        """Record that a request that begins with these units was placed on an instance."""
        if instance.cache is not None:
            self._placed.place(instance.instance_id, names, now_s)

    # ---- PrefixSource (tailrace/control/hot_prefixes.py)

    def located(self, request_id: str) -> str | None:
        """Return the instance that has the request, or None."""
        job = self._jobs[request_id]
        return None if job.state is JobState.DONE else job.instance_id or None

    def held(self, names: Sequence[int], block_tokens: int, now_s: float) -> Mapping[str, CachedTokens]:
        """Return the tokens of these units that each instance holds, or is about to.

        Workers report changes together with the phase events that placement already uses, practically without
        delay.
        """
        self._placed.forget(now_s)
        for instance in self._instances:
            if instance.cache is not None:
                self._index.change(instance.instance_id, *instance.cache.changes.take())
                self._index.change(instance.instance_id, *instance.host.changes.take(), Tier.HOST)
        held, coming = self._index.match(names), self._placed.index.match(names)
        return cached_tokens(held, coming, block_tokens, len(names) * block_tokens)

    def exchanging(self, instance_id: str) -> Collection[str]:
        """Return all instances."""
        return self._names
