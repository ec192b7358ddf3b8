"""Ask a part whether it is ready."""

from __future__ import annotations

import asyncio
from typing import Final

from tailrace.local.plan import PartSpec, Tier
from tailrace.service.probe import Unhealthy, check_grpc, check_http

_TIMEOUT_S: Final = 2.0


async def is_ready(spec: PartSpec) -> bool:
    """One attempt, at most a few seconds long."""
    try:
        await asyncio.to_thread(_check, spec)
    except Unhealthy:
        return False
    return True


def _check(spec: PartSpec) -> None:
    if spec.tier is Tier.ETCD:
        check_http(f"http://{spec.address}/health", _TIMEOUT_S)
        return
    check_grpc(spec.address, "", _TIMEOUT_S)
    if spec.http:
        # Not /v1/models: an API key protects that.
        check_http(f"{spec.http}/health", _TIMEOUT_S)
