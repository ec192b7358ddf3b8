"""Why requests are migrated: the words that policies and the control plane use.

A policy of somebody else's may use words of its own; records keep them, metrics count them as "other".
"""

from __future__ import annotations

from typing import Final

# Improve what an instance's batch or memory will look like; nobody waits for any of them.
BACKGROUND: Final = frozenset({"rescheduling", "rebalance", "overloaded", "load", "length boundary"})
# A user waits for the next token, or an operator for an instance to be empty.
URGENT: Final = frozenset({"prefill done", "reasoning ended", "drain", "operator"})

OTHER: Final = "other"


def label(reason: str) -> str:
    """The reason as a metric's label: of a bounded set."""
    return reason if reason in BACKGROUND or reason in URGENT else OTHER
