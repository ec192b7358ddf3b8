"""Which way a running request goes from one instance to another: live, by replay, or not at all."""

from __future__ import annotations

import enum
from typing import Final

import msgspec


class Way(enum.Enum):
    """The values of the proto enum, in words; tailrace.messages has both."""

    # Its KV travels.
    LIVE = "live"
    # The target computes its KV anew from the tokens made so far.
    REPLAY = "replay"
    # It ends where it is.
    STAYS = "stays"


class Handover(msgspec.Struct, frozen=True):
    """How the requests of an instance leave it, and come to it. `reason`: why not live; empty where they go
    live."""

    way: Way = Way.LIVE
    reason: str = ""


LIVE: Final = Handover()


def by_replay(reason: str) -> Handover:
    """By replay, for this reason."""
    return Handover(Way.REPLAY, reason)


def between(source: Handover, target: Handover) -> Handover:
    """The way of a request from one to the other: that of the end that can do less."""
    for way in (Way.STAYS, Way.REPLAY):
        for handover, end in ((source, "source"), (target, "target")):
            if handover.way is way:
                return Handover(way, f"{end}: {handover.reason}")
    return LIVE


# Improve what an instance's batch or memory will look like; nobody waits for any of them.
BACKGROUND: Final = frozenset({"rescheduling", "rebalance", "overloaded", "load", "length boundary"})
# A user waits for the next token, or an operator for an instance to be empty.
URGENT: Final = frozenset({"prefill done", "reasoning ended", "drain", "operator"})

OTHER: Final = "other"


def label(reason: str) -> str:
    """The reason as a metric's label: of a bounded set.

    A policy of somebody else's may use words of its own; records keep them, metrics count them as "other".
    """
    return reason if reason in BACKGROUND or reason in URGENT else OTHER
