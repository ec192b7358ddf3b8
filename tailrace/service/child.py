"""Run another program's server, such as an API server or a proxy, as a supervised child process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tailrace.service import die_with_parent

# Seconds for the child to close its connections after SIGTERM.
_GRACE_S: Final = 8.0


class Child:
    """Control the running child. Its output goes to this process's stderr and stdout, unchanged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        # Whether it was told to exit after its responses.
        self.finishing = False

    @classmethod
    async def launch(cls, command: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> Child:
        """Start `command` with these file descriptors inherited. Raise OSError."""
        shim = str(Path(die_with_parent.__file__))
        wrapped = [sys.executable, "-I", "-S", shim, str(os.getpid()), *command]
        process = await asyncio.create_subprocess_exec(
            *wrapped, stdin=asyncio.subprocess.DEVNULL, pass_fds=tuple(fds), env={**os.environ, **env}
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Return the child's process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Return its exit status, negative if a signal killed it; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the child to exit; return its status, negative if a signal killed it."""
        return await self._process.wait()

    async def finish(self, timeout_s: float) -> bool:
        """Stop accepting, finish the responses and exit; return False if that takes longer than
        `timeout_s`. Can be called again to wait longer."""
        with suppress(ProcessLookupError):
            # Some take a second signal as an order to drop what they have.
            if not self.finishing:
                self.finishing = True
                self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
            except TimeoutError:
                return False
        return True

    async def stop(self) -> None:
        """Send SIGTERM, then SIGKILL if it does not exit; SIGKILL at once if it was already told to
        finish."""
        with suppress(ProcessLookupError):
            if self.finishing:
                self._process.kill()
            self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_GRACE_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
