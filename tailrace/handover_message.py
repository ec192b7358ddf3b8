"""Ways as messages."""

from __future__ import annotations

from typing import Final

from tailrace.handover import Way
from tailrace.v1 import types_pb2

WAYS: Final = {
    Way.LIVE: types_pb2.WAY_LIVE,
    Way.REPLAY: types_pb2.WAY_REPLAY,
    Way.STAYS: types_pb2.WAY_STAYS,
}
