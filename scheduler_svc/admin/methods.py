"""Names of the admin API's methods, and how long those of the leader may take."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tailrace.v1 import admin_pb2

SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
ADMIN: Final = f"/{SERVICE.full_name}/"
"""What the names of all methods begin with, as gRPC has them."""

RECORD_S: Final = 3_600.0
"""Longest recording."""

_WRITE_S: Final = 10.0
_STREAM_S: Final = 1_800.0

OF_LEADER: Final[Mapping[str, float]] = MappingProxyType(
    {
        f"{ADMIN}{method}": timeout_s
        for method, timeout_s in {
            "SetPolicy": _WRITE_S,
            "SetSlo": _WRITE_S,
            "SetPool": _WRITE_S,
            "SetStages": _WRITE_S,
            "SetShadow": _WRITE_S,
            "GetShadow": _WRITE_S,
            "Record": RECORD_S + _WRITE_S,
            "Migrate": _STREAM_S,
            "Drain": _STREAM_S,
        }.items()
    }
)
"""Methods that the leading scheduler alone carries out, with the seconds that one may take."""
