"""Sticky sessions: place all requests of a session on one instance, regardless of load."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final

from tailrace.actions import Place, Placement
from tailrace.cluster import Arrival, ClusterView
from tailrace.policy.base import Policy
from tailrace.policy.candidates import NO_INSTANCE, candidates
from tailrace.policy.parameters import parameter

_MASK: Final = (1 << 64) - 1


class Session(Policy):
    """Hash consistently on the client's session ID, else on the prompt's first blocks, else on the request
    ID.

    Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM
    Transactions on Networking 6(1), 1998): each instance gets a score from its id and the key, and the
    highest score wins. When an instance joins or leaves, only its own sessions move.
    """

    blocks: int = parameter(
        4,
        "number of leading blocks of a prompt that identify a session if the client sends no session ID",
        unit="blocks",
        minimum=1,
    )
    summary = "each session to one instance, by consistent hashing on its id or the first blocks"

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        """Return the instance with the highest score for the session's key."""
        instances = candidates(view, arrival)
        if not instances:
            return NO_INSTANCE
        key = self._key(arrival)
        return Place(max(instances, key=lambda i: _mixed(key ^ _digest(i.instance_id))).instance_id)

    def _key(self, arrival: Arrival) -> int:
        if arrival.session_id:
            return _digest(arrival.session_id)
        names = arrival.block_names
        # A block's name identifies the block and everything before it.
        return names[min(self.blocks, len(names)) - 1] if names else _digest(arrival.request_id)


@lru_cache(maxsize=8_192)
def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _mixed(value: int) -> int:
    """Apply the finalizer of the SplitMix64 generator (Steele et al., OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
