"""Named fault points for tests. Nothing happens here unless TAILRACE_FAULTS is set.

Its value is a JSON object, or a list of them; or @PATH, a file that holds one and is read at every fault
point, so that a test can arm and disarm a running worker by writing and removing it:

    {"hold": "import:paused", "seconds": 30}     stop at this point of a migration for 30 seconds
    {"corrupt": "kv"}                            flip one byte of the next block that is sent, once

"instance": "worker-1" in any of them confines it to one worker. Points: `import:` (target) or `export:`
(source) with `open`, `pre_copy`, `paused`, `adopt`; and `import:adopted` (accepted, not yet running). A point
that holds says so in the log, so that a test can kill the process then; it continues early when disarmed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from worker_agent.engine.base import Staging

log = logging.getLogger(__name__)

VARIABLE: Final = "TAILRACE_FAULTS"

_POLL_S: Final = 0.05


class FaultSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault."""

    hold: str = ""
    seconds: float = 30.0
    corrupt: str = ""
    instance: str = ""


class Faults:
    """The faults of one worker."""

    def __init__(
        self, specs: Sequence[FaultSpec] = (), file: Path | None = None, instance_id: str = ""
    ) -> None:
        self._specs = tuple(specs)
        self._file = file
        self._instance_id = instance_id
        # Corruptions done, by the file's modification time (0: none): each arming corrupts once.
        self._corrupted_at: int | None = None

    @classmethod
    def from_environment(cls, instance_id: str) -> Faults:
        """Read the faults of TAILRACE_FAULTS. Raise RuntimeError if it is malformed."""
        text = os.environ.get(VARIABLE, "")
        if not text:
            return cls()
        log.warning("%s is set: this worker fails on purpose", VARIABLE)
        if text.startswith("@"):
            return cls((), Path(text[1:]), instance_id)
        return cls([spec for spec in _read(text) if spec.instance in ("", instance_id)])

    async def hold(self, point: str) -> None:
        """Stop at this point if a fault says so."""
        seconds = self._hold_s(point)
        if seconds is None:
            return
        log.warning("fault: holding at %s", point)
        until_s = time.monotonic() + seconds
        # A file gives no event when it is removed.
        while (left_s := until_s - time.monotonic()) > 0 and self._hold_s(point) is not None:  # noqa: ASYNC110
            await asyncio.sleep(min(left_s, _POLL_S))

    def corrupt(self, staging: Staging, size: int) -> None:
        """Flip one of the first `size` bytes, which are about to be sent, if a fault says so. Host memory
        only."""
        if not any(spec.corrupt == "kv" for spec in self._armed()):
            return
        armed_at = 0 if self._file is None else self._file.stat().st_mtime_ns
        if self._corrupted_at != armed_at:
            self._corrupted_at = armed_at
            data = np.frombuffer(staging.buffer, np.uint8)  # type: ignore[call-overload]
            data[size // 2] ^= 0xFF
            log.warning("fault: corrupted a block")

    def _hold_s(self, point: str) -> float | None:
        return next((spec.seconds for spec in self._armed() if spec.hold == point), None)

    def _armed(self) -> Sequence[FaultSpec]:
        if self._file is None:
            return self._specs
        try:
            text = self._file.read_text()
        except FileNotFoundError:
            return ()
        return [spec for spec in _read(text) if spec.instance in ("", self._instance_id)]


def _read(text: str) -> list[FaultSpec]:
    try:
        read = msgspec.json.decode(text, type=FaultSpec | list[FaultSpec])
    except msgspec.MsgspecError as error:
        raise RuntimeError(f"{VARIABLE}: {error}") from error
    return read if isinstance(read, list) else [read]
