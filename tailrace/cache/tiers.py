"""Where an instance keeps a block of KV."""

from __future__ import annotations

import enum


class Tier(enum.Enum):
    """Memory that blocks are found in. A block may be in both."""

    DEVICE = "device"
    HOST = "host"
