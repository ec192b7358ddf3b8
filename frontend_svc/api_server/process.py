"""An API server as a supervised child process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from frontend_svc.api_server import die_with_parent

# Seconds for the API server to close its connections after SIGTERM.
_GRACE_S: Final = 8.0


class ApiServer:
    """The running child. Its output goes to our stderr and stdout, unchanged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        # Told to end once its responses have.
        self.finishing = False

    @classmethod
    async def launch(cls, command: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> ApiServer:
        """Start `command` with these file descriptors inherited. Raises OSError."""
        shim = str(Path(die_with_parent.__file__))
        wrapped = [sys.executable, "-I", "-S", shim, str(os.getpid()), *command]
        process = await asyncio.create_subprocess_exec(
            *wrapped, stdin=asyncio.subprocess.DEVNULL, pass_fds=tuple(fds), env={**os.environ, **env}
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    async def wait(self) -> int:
        """The exit status once it has ended; negative: ended by that signal."""
        return await self._process.wait()

    async def finish(self, timeout_s: float) -> bool:
        """Have it accept nothing more, finish its responses and end. False: it has not within the time."""
        self.finishing = True
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
            except TimeoutError:
                return False
        return True

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when that does not end it. SIGKILL at once if it has been told to finish."""
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
