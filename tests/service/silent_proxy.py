"""A TCP proxy that can stop forwarding, like a network that loses all packets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SilentProxy:
    """Forward both ways while `open` is set; connections stay open otherwise."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.address = ""
        self.open = asyncio.Event()
        self.open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
            await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # Both peers see the connection close.
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self.open.wait()
            writer.write(data)
            await writer.drain()
        writer.close()

    def end(self) -> None:
        """Break all connections."""
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def silent_proxy(address: str) -> AsyncIterator[SilentProxy]:
    """Run a proxy to HOST:PORT, listening at its `address`, until the block ends."""
    host, _, port = address.rpartition(":")
    proxy = SilentProxy(host, int(port))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.end()
