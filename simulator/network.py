"""Model links: each instance has a full-duplex port, shared equally by its transfers.

The rate of a transfer is the least of its shares: of the source's sending port, of the target's receiving
port, and of the fabric if that is limited. Capacity that a transfer leaves unused at one port because another
limits it is not given to its neighbours there (equal shares, not max-min fairness).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from simulator.cluster import LinkSpec
from simulator.events import EventQueue


class _Transfer:
    __slots__ = ("bytes_left", "done", "rate", "since_s", "source", "target", "version")

    def __init__(self, source: str, target: str, size: float, done: Callable[[float], None]) -> None:
        self.source = source
        self.target = target
        self.bytes_left = size
        self.done = done
        self.rate = 0.0
        self.since_s = 0.0
        self.version = 0


class Network:
    """All transfers in progress."""

    def __init__(self, link: LinkSpec, events: EventQueue) -> None:
        self._link = link
        self._events = events
        self._sending: dict[str, dict[_Transfer, None]] = {}
        self._receiving: dict[str, dict[_Transfer, None]] = {}
        self._all: dict[_Transfer, None] = {}

    def send(self, source: str, target: str, size: int, now: float, done: Callable[[float], None]) -> None:
        """Send `size` bytes and call `done(time)` when the last has arrived."""
        if not size:
            self._events.schedule(now + self._link.latency_s, done)
            return
        transfer = _Transfer(source, target, float(size), done)
        self._events.schedule(now + self._link.latency_s, lambda time_s: self._begin(transfer, time_s))

    def _begin(self, transfer: _Transfer, now: float) -> None:
        self._sending.setdefault(transfer.source, {})[transfer] = None
        self._receiving.setdefault(transfer.target, {})[transfer] = None
        self._all[transfer] = None
        transfer.since_s = now
        self._share(self._affected(transfer), now)

    def _affected(self, transfer: _Transfer) -> list[_Transfer]:
        """Return the transfers whose share depends on this one, including itself."""
        if self._link.fabric_bytes_per_s is not None:
            return list(self._all)
        affected: Iterable[_Transfer] = self._sending[transfer.source]
        return list(dict.fromkeys([*affected, *self._receiving[transfer.target]]))

    def _share(self, transfers: list[_Transfer], now: float) -> None:
        link = self._link
        for transfer in transfers:
            rate = link.bytes_per_s / max(
                len(self._sending[transfer.source]), len(self._receiving[transfer.target])
            )
            if link.fabric_bytes_per_s is not None:
                rate = min(rate, link.fabric_bytes_per_s / len(self._all))
            if rate == transfer.rate:
                continue
            transfer.bytes_left -= transfer.rate * (now - transfer.since_s)
            transfer.since_s = now
            transfer.rate = rate
            transfer.version += 1
            end_s = now + max(0.0, transfer.bytes_left) / rate
            self._events.schedule(end_s, self._ending(transfer, transfer.version))

    def _ending(self, transfer: _Transfer, version: int) -> Callable[[float], None]:
        def end(now: float) -> None:
            if transfer.version == version:
                self._end(transfer, now)

        return end

    def _end(self, transfer: _Transfer, now: float) -> None:
        affected = self._affected(transfer)
        del self._sending[transfer.source][transfer]
        del self._receiving[transfer.target][transfer]
        del self._all[transfer]
        affected.remove(transfer)
        self._share(affected, now)
        transfer.done(now)
