"""A misbehaving etcd member: a gRPC proxy in front of a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from tailrace.v1 import etcd_pb2
from tests.raw_replies import UNDECODABLE
from tests.waiting import WAIT_S

TXN = "/etcdserverpb.KV/Txn"
LEASE_GRANT = "/etcdserverpb.Lease/LeaseGrant"
WATCH = "/etcdserverpb.Watch/Watch"
_STREAMS = (WATCH, "/etcdserverpb.Lease/LeaseKeepAlive")


class EtcdProxy(grpc.GenericRpcHandler):
    """Forward bytes both ways, except as `lost`, `refused`, `held` and `silent` specify."""

    def __init__(self, upstream: grpc.aio.Channel) -> None:
        self._upstream = upstream
        self.endpoint = ""
        # Methods whose next reply is lost after etcd has executed the request.
        self.lost: list[str] = []
        # Methods whose next request is lost before etcd executes it.
        self.refused: list[str] = []
        # Methods whose next reply cannot be decoded, after etcd has executed the request.
        self.garbled: list[str] = []
        # Requests to these methods wait until `release` is set, and are forwarded even if the caller left.
        self.held: set[str] = set()
        self.release = asyncio.Event()
        self.arrived = asyncio.Event()
        # While it is set, only the opening of streams passes, and there are no replies.
        self.silent = asyncio.Event()
        # While it is set, the member seems to lag: it reports no events and an unchanged revision.
        self.behind = asyncio.Event()
        # Called methods, in order.
        self.calls: list[str] = []
        self.late: list[asyncio.Task[bytes]] = []

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return a handler that forwards the method."""
        path = handler_call_details.method

        async def unary(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return await self._unary(path, request, context)

        async def stream(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            async for reply in self._stream(path, requests):
                yield reply

        if path in _STREAMS:
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)

    async def _unary(
        self, path: str, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> bytes:
        self.calls.append(path)
        if self.silent.is_set():
            await asyncio.Event().wait()
        if path in self.refused:
            self.refused.remove(path)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "etcdserver: the request is lost")
        call = self._upstream.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)

        async def forward() -> bytes:
            if path in self.held:
                self.arrived.set()
                await self.release.wait()
            return await call(request, timeout=WAIT_S)

        if path in self.held:
            late = asyncio.create_task(forward())
            self.late.append(late)
            return await asyncio.shield(late)
        try:
            reply = await forward()
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        if path in self.lost:
            self.lost.remove(path)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "etcdserver: the reply is lost")
        if path in self.garbled:
            self.garbled.remove(path)
            return UNDECODABLE
        return reply

    async def _stream(self, path: str, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self.calls.append(path)
        call = self._upstream.stream_stream(path, request_serializer=bytes, response_deserializer=bytes)()

        async def pump() -> None:
            async for request in requests:
                if not self.silent.is_set():
                    await call.write(request)

        pumping = asyncio.create_task(pump())
        revision = 0
        try:
            while isinstance(reply := await call.read(), bytes):
                if self.silent.is_set():
                    await asyncio.Event().wait()
                if path == WATCH:
                    response = etcd_pb2.WatchResponse.FromString(reply)
                    if self.behind.is_set():
                        response.header.revision = revision
                        del response.events[:]
                        reply = response.SerializeToString()
                    revision = response.header.revision
                yield reply
        finally:
            pumping.cancel()
            call.cancel()
            await asyncio.wait([pumping])


@asynccontextmanager
async def etcd_proxy(etcd: str, listen: str = "127.0.0.1:0") -> AsyncIterator[EtcdProxy]:
    """Run a member at its own endpoint, in front of the etcd at HOST:PORT."""
    async with grpc.aio.insecure_channel(etcd) as upstream:
        proxy = EtcdProxy(upstream)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((proxy,))
        host = listen.rpartition(":")[0]
        proxy.endpoint = f"{host}:{server.add_insecure_port(listen)}"
        await server.start()
        try:
            yield proxy
        finally:
            proxy.release.set()
            await server.stop(None)
            if proxy.late:
                await asyncio.wait(proxy.late)
