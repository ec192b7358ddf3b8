"""Track hot prefixes, the instances that hold them, and copies of them in progress, for policies that copy
ahead.

One implementation for two clocks: the live scheduler and the simulator make the same calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tailrace.actions import CopyPrefix
from tailrace.cache.recent import PrefixArrival, RecentPrefixes, SharedPrefix, common_blocks
from tailrace.cluster import Arrival, CachedTokens, HotPrefix, HotPrefixes

# Prefixes in a policy's view: the ones with the most tokens requested.
_PREFIXES_MAX: Final = 16
# Seconds for which a finished copy still counts: by then a report shows its result.
_REPORT_LAG_S: Final = 2.0
# Seconds after which a copy without an end is dropped; longer than any may take.
_COPY_TIMEOUT_S: Final = 60.0


class PrefixSource(Protocol):
    """What a cluster model knows of requests and their prefixes."""

    def located(self, request_id: str) -> str | None:
        """Return the instance that has the request, or None."""

    def held(self, names: Sequence[int], block_tokens: int, now_s: float) -> Mapping[str, CachedTokens]:
        """Return the tokens of these blocks that each instance holds."""

    def exchanging(self, instance_id: str) -> Collection[str]:
        """Return the instances that can take KV from this one; itself among them."""


@dataclass(frozen=True, slots=True)
class OpenCopy:
    """Blocks being copied to an instance, or copied but not reported yet; it counts until `until_s`."""

    target_id: str
    names: Sequence[int]
    until_s: float


class HotTracker:
    """Track arrivals and copies; tracks nothing until a policy uses it."""

    def __init__(self, known: PrefixSource) -> None:
        self._source = known
        self._recent: RecentPrefixes | None = None
        # By target, which has one at a time.
        self._copies: dict[str, OpenCopy] = {}

    # ---- what happens

    def track(self, period_s: float | None) -> None:
        """Keep the arrivals of the last `period_s` seconds from now on; None: keep none."""
        if period_s != (None if self._recent is None else self._recent.period_s):
            self._recent = None if period_s is None else RecentPrefixes(period_s)

    def arrived(self, arrival: Arrival, now_s: float) -> None:
        """Add a new request that was placed."""
        if self._recent is not None and not arrival.admitted:
            names, block_tokens = arrival.block_names, arrival.block_tokens
            self._recent.arrived(PrefixArrival(now_s, arrival.request_id, names, block_tokens))

    def may_copy(self, copy: CopyPrefix, now_s: float) -> bool:
        """Return False if its target has an open copy already or the prefix is not known any more."""
        self._drop_expired(now_s)
        recent = self._recent
        if recent is None or copy.target_id in self._copies:
            return False
        return recent.find(copy.request_id) is not None

    def add_copy(self, copy: CopyPrefix, now_s: float) -> None:
        """Add a copy that `may_copy` allows now; of a prefix that is not known there is none."""
        arrival = None if self._recent is None else self._recent.find(copy.request_id)
        if arrival is None:
            return
        names = arrival.names[: copy.tokens // arrival.block_tokens]
        self._copies[copy.target_id] = OpenCopy(copy.target_id, names, now_s + _COPY_TIMEOUT_S)

    def end_copy(self, target_id: str, now_s: float) -> None:
        """The copy to that instance is over, whatever came of it."""
        under_way = self._copies.get(target_id)
        if under_way is not None:
            self._copies[target_id] = OpenCopy(target_id, under_way.names, now_s + _REPORT_LAG_S)

    # ---- what a policy sees

    def view(self, now_s: float) -> HotPrefixes | None:
        """Return the hot prefixes now; None if they are not tracked."""
        if self._recent is None:
            return None
        self._drop_expired(now_s)
        views = (self._view_of(shared, now_s) for shared in self._recent.shared(now_s, _PREFIXES_MAX))
        return HotPrefixes(
            self._recent.period_s,
            tuple(prefix for prefix in views if prefix is not None),
            frozenset(self._copies),
        )

    def _view_of(self, shared: SharedPrefix, now_s: float) -> HotPrefix | None:
        """Return the view of one prefix, or None if no instance has a request that begins with it any
        more."""
        requests: dict[str, str] = {}
        for arrival in shared.arrivals:
            instance_id = self._source.located(arrival.request_id)
            if instance_id is not None:
                requests.setdefault(instance_id, arrival.request_id)
        if not requests:
            return None
        # Block names depend on tokens only: another model's prompts may have the same names.
        among = frozenset(self._source.exchanging(next(iter(requests))))
        cached = dict(self._source.held(shared.names, shared.block_tokens, now_s))
        for copy in self._copies.values():
            coming = common_blocks(copy.names, shared.names) * shared.block_tokens
            here = cached.get(copy.target_id, CachedTokens(0, 0))
            if coming > here.device:
                cached[copy.target_id] = CachedTokens(coming, max(coming, here.total), here.reported)
        return HotPrefix(
            shared.tokens,
            len(shared.arrivals),
            {name: held for name, held in cached.items() if name in among},
            {name: request_id for name, request_id in requests.items() if name in among},
            among,
        )

    # ---- recordings

    @property
    def recent(self) -> RecentPrefixes | None:
        """Return the tracked arrivals; None if none are tracked."""
        return self._recent

    @property
    def copies(self) -> list[OpenCopy]:
        """Return the copies that count."""
        return list(self._copies.values())

    def restore(self, recent: RecentPrefixes | None, copies: Iterable[OpenCopy]) -> None:
        """Continue from a recorded state."""
        self._recent = recent
        self._copies = {copy.target_id: copy for copy in copies}

    def _drop_expired(self, now_s: float) -> None:
        self._copies = {name: copy for name, copy in self._copies.items() if copy.until_s > now_s}
