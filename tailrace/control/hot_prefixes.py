"""Which prefixes are hot, who holds them, and what copies of them are under way: for policies that copy.

One for two clocks: the live scheduler and the simulator feed it with the same calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tailrace.actions import CopyPrefix
from tailrace.cache.recent import PrefixArrival, RecentPrefixes, SharedPrefix, agreeing
from tailrace.cluster import Arrival, CachedTokens, HotPrefix, HotPrefixes

# Prefixes that a policy is shown, the heaviest.
_SHOWN: Final = 16
# A copy counts for so long after its end: what it has brought, or that it was refused, is told by then.
_TOLD_S: Final = 2.0
# Copies that end nowhere; longer than any may take.
_LOST_S: Final = 60.0


class KnowsPrefixes(Protocol):
    """What a model of the cluster knows about requests and their prefixes."""

    def located(self, request_id: str) -> str | None:
        """The instance that has the request; None: none, as far as is known."""

    def held(self, names: Sequence[int], block_tokens: int, now_s: float) -> Mapping[str, CachedTokens]:
        """Tokens of these blocks that each instance holds."""

    def exchanging(self, instance_id: str) -> Collection[str]:
        """Instances that can take KV from this one, itself among them."""


@dataclass(frozen=True, slots=True)
class CopyUnderWay:
    """Blocks on their way to an instance, or told of soon; `until_s`: it counts until then."""

    target_id: str
    names: Sequence[int]
    until_s: float


class HotTracker:
    """Counts nothing until a policy wants to know."""

    def __init__(self, known: KnowsPrefixes) -> None:
        self._known = known
        self._recent: RecentPrefixes | None = None
        # By target: there is one at a time.
        self._copies: dict[str, CopyUnderWay] = {}

    # ---- what happens

    def keep(self, period_s: float | None) -> None:
        """Keep the arrivals of so many seconds from now on; None: none."""
        if period_s != (None if self._recent is None else self._recent.period_s):
            self._recent = None if period_s is None else RecentPrefixes(period_s)

    def arrived(self, arrival: Arrival, block_tokens: int, now_s: float) -> None:
        """A new request was placed."""
        if self._recent is not None and not arrival.admitted:
            names = arrival.block_names
            self._recent.arrived(PrefixArrival(now_s, arrival.request_id, names, block_tokens))

    def ordered(self, copy: CopyPrefix, now_s: float) -> bool:
        """Count a copy in. False: one to that instance is under way, or nothing is known of the prefix."""
        self._forget(now_s)
        recent = self._recent
        if recent is None or copy.target_id in self._copies:
            return False
        found = recent.find(copy.request_id)
        if found is None:
            return False
        names = found.names[: copy.tokens // found.block_tokens]
        self._copies[copy.target_id] = CopyUnderWay(copy.target_id, names, now_s + _LOST_S)
        return True

    def settled(self, target_id: str, now_s: float) -> None:
        """The copy to that instance is over, whatever came of it."""
        under_way = self._copies.get(target_id)
        if under_way is not None:
            self._copies[target_id] = CopyUnderWay(target_id, under_way.names, now_s + _TOLD_S)

    # ---- what a policy sees

    def view(self, now_s: float) -> HotPrefixes | None:
        """Now; None: nobody wants to know."""
        if self._recent is None:
            return None
        self._forget(now_s)
        found = (self._view_of(shared, now_s) for shared in self._recent.shared(now_s, _SHOWN))
        return HotPrefixes(
            self._recent.period_s,
            tuple(prefix for prefix in found if prefix is not None),
            frozenset(self._copies),
        )

    def _view_of(self, shared: SharedPrefix, now_s: float) -> HotPrefix | None:
        """None: no instance has a request that begins with it any more."""
        requests: dict[str, str] = {}
        for arrival in shared.arrivals:
            instance_id = self._known.located(arrival.request_id)
            if instance_id is not None:
                requests.setdefault(instance_id, arrival.request_id)
        if not requests:
            return None
        # Of another model's prompts the same tokens may be known by the same names.
        among = frozenset(self._known.exchanging(next(iter(requests))))
        cached = dict(self._known.held(shared.names, shared.block_tokens, now_s))
        for copy in self._copies.values():
            coming = agreeing(copy.names, shared.names) * shared.block_tokens
            here = cached.get(copy.target_id, CachedTokens(0, 0))
            if coming > here.device:
                cached[copy.target_id] = CachedTokens(coming, max(coming, here.total), here.told)
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
        """Arrivals that are remembered; None: none are."""
        return self._recent

    @property
    def copies(self) -> list[CopyUnderWay]:
        """Those that count."""
        return list(self._copies.values())

    def restore(self, recent: RecentPrefixes | None, copies: Iterable[CopyUnderWay]) -> None:
        """Go on from there."""
        self._recent = recent
        self._copies = {copy.target_id: copy for copy in copies}

    def _forget(self, now_s: float) -> None:
        self._copies = {name: copy for name, copy in self._copies.items() if copy.until_s > now_s}
