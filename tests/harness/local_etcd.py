"""Run an etcd of one member that can be killed, frozen and restarted on the same data and port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tailrace.service.etcd import check_etcd, etcd_command, etcd_environment
from tailrace.service.probe import Unhealthy
from tests.ports import free_port
from tests.waiting import WAIT_S

_STOP_S: Final = 5.0
_POLL_S: Final = 0.02


class EtcdStartError(RuntimeError):
    """etcd exited while starting, or did not answer in time."""


class LocalEtcd:
    """Control the etcd process."""

    def __init__(
        self, data_dir: Path, port: int, arguments: Sequence[str] = (), tls: Path | None = None
    ) -> None:
        """`arguments`: additional ones for etcd."""
        self.data_dir = data_dir
        self.port = port
        self._arguments = arguments
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the ID of the process that was started last."""
        return None if self._process is None else self._process.pid

    @property
    def endpoint(self) -> str:
        """Return HOST:PORT for clients."""
        return f"127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Start the process without waiting for it to answer."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with (self.data_dir.parent / f"{self.data_dir.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*etcd_command(self.data_dir, self.port, self._tls), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=etcd_environment(),
            )

    def answers(self) -> bool:
        """Return whether it is ready. Raise EtcdStartError if it has exited."""
        if self._process is None or self._process.poll() is not None:
            raise EtcdStartError(f"etcd exited; see {self.data_dir}.log")
        try:
            check_etcd(self.endpoint, 1.0, self._tls)
        except Unhealthy:
            return False
        return True

    async def start(self) -> None:
        """Start or restart it and wait until it answers. Raise EtcdStartError."""
        self.launch()
        deadline_s = time.monotonic() + WAIT_S
        while not await asyncio.to_thread(self.answers):
            if time.monotonic() > deadline_s:
                self.kill()
                raise EtcdStartError(f"etcd did not answer within {WAIT_S:.0f} s; see {self.data_dir}.log")
            await asyncio.sleep(_POLL_S)

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT_S)

    def freeze(self) -> None:
        """Send SIGSTOP and wait until the process has stopped: it hangs without dying."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Send SIGCONT."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL if it does not exit."""
        if self._process is None or self._process.poll() is not None:
            return
        self.thaw()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
            return
        self.kill()


@asynccontextmanager
async def local_etcd(
    data_dir: Path, port: int = 0, arguments: Sequence[str] = (), tls: Path | None = None
) -> AsyncIterator[LocalEtcd]:
    """Run etcd (port 0: any free one) for the duration of the block; its data stays."""
    etcd = LocalEtcd(data_dir, port or free_port(), arguments, tls)
    try:
        await etcd.start()
        yield etcd
    finally:
        await asyncio.to_thread(etcd.stop)
