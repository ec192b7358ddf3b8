"""How a running request moves to another instance: live, by replay, or not at all."""

from __future__ import annotations

import enum
from typing import Final

import msgspec


class TransferMode(enum.Enum):
    """The modes; the values of the protobuf enum `Way` correspond to them (tailrace.messages)."""

    # Its KV is transferred.
    LIVE = "live"
    # The target recomputes its KV from the tokens generated so far.
    REPLAY = "replay"
    # It cannot move.
    STAYS = "stays"


class Handover(msgspec.Struct, frozen=True):
    """How requests move from and to an instance. `reason`: why not live; empty if live."""

    # Stored and sent as `way`.
    mode: TransferMode = msgspec.field(default=TransferMode.LIVE, name="way")
    reason: str = ""


LIVE: Final = Handover()

TRANSFERS: Final = 3
"""Open migrations that an instance may send, and as many that it may receive, by default ("capped at three
parallel transfers": CascadeInfer, section 5)."""


ADOPT_S: Final = 10.0
"""Seconds that a target waits for the front end's answer to its commit; then it disconnects the front end."""

TELL_SOURCE_S: Final = 2.0
"""Seconds that a target waits for its source to have heard how the migration ended."""

SETTLE_S: Final = ADOPT_S + TELL_SOURCE_S + 3.0
"""Seconds that a migration may still take after the deadline of its copy: the waits above, and the engine's
between two steps. The migration service and the source wait for it."""

MIGRATE_MAX_S: Final = 180.0
"""Seconds that a migration may take in all, with its waits for a slot and for room."""


def by_replay(reason: str) -> Handover:
    """Return a handover by replay, with its reason."""
    return Handover(TransferMode.REPLAY, reason)


def handover_between(source: Handover, target: Handover) -> Handover:
    """Return how requests move from one instance to another: as the end that supports less."""
    for mode in (TransferMode.STAYS, TransferMode.REPLAY):
        for handover, end in ((source, "source"), (target, "target")):
            if handover.mode is mode:
                return Handover(mode, f"{end}: {handover.reason}")
    return LIVE


# Migrations that improve an instance's batch or memory; no user waits for them.
BACKGROUND: Final = frozenset({"rescheduling", "rebalance", "overloaded", "load", "length boundary"})
# Migrations for which a user waits for the next token, or an operator for an instance to be empty.
URGENT: Final = frozenset({"prefill done", "reasoning ended", "drain", "operator"})

OTHER: Final = "other"
LABELS: Final = (*sorted(BACKGROUND | URGENT), OTHER)
"""What `label` returns."""


def label(reason: str) -> str:
    """Return the reason as a metric's label, from a bounded set.

    Third-party policies may use other reasons; records keep them, metrics count them as "other".
    """
    return reason if reason in BACKGROUND or reason in URGENT else OTHER
