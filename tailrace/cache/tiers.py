"""The memory tiers in which an instance keeps KV blocks."""

from __future__ import annotations

import enum


class Tier(enum.Enum):
    """A memory tier. A block may be in both."""

    DEVICE = "device"
    HOST = "host"
