"""Ask a part whether it is ready."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from typing import Final

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tailrace.local.plan import PartSpec, Tier

_TIMEOUT_S: Final = 2.0


async def is_ready(spec: PartSpec) -> bool:
    """One attempt, at most a few seconds long."""
    if spec.tier is Tier.ETCD:
        return await _http_ok(f"http://{spec.address}/health")
    if not await _grpc_serving(spec.address):
        return False
    return not spec.http or await _http_ok(f"{spec.http}/v1/models")


async def _grpc_serving(address: str) -> bool:
    """Whether the standard health check says SERVING."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            reply = await HealthStub(channel).Check(HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == HealthCheckResponse.SERVING)


async def _http_ok(url: str) -> bool:
    return await asyncio.to_thread(_get, url)


def _get(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False
