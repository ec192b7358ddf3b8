"""Named fault points for tests. Nothing happens here unless TAILRACE_FAULTS is set.

Its value is a JSON object, or a list of them:

    {"hold": "import:paused", "seconds": 30}     stop at this point of a migration for so long
    {"corrupt": "kv"}                            flip one byte of the next block that is sent, once

and "instance": "worker-1" in any of them confines it to one worker. Points: `import:` (target) or `export:`
(source) with `open`, `pre_copy`, `paused`, `adopt`, and `import:adopted` (accepted, not yet running). A point
that holds says so in the log, so that a test can kill the process then.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from worker_agent.engine.base import Staging

log = logging.getLogger(__name__)

VARIABLE: Final = "TAILRACE_FAULTS"


class FaultSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault."""

    hold: str = ""
    seconds: float = 30.0
    corrupt: str = ""
    instance: str = ""


class Faults:
    """The faults of one worker."""

    def __init__(self, specs: Sequence[FaultSpec] = ()) -> None:
        self._holds = {spec.hold: spec.seconds for spec in specs if spec.hold}
        self._corrupt = sum(1 for spec in specs if spec.corrupt == "kv")

    @classmethod
    def from_environment(cls, instance_id: str) -> Faults:
        """Raises RuntimeError when the variable is not as described."""
        text = os.environ.get(VARIABLE, "")
        if not text:
            return cls()
        try:
            read = msgspec.json.decode(text, type=FaultSpec | list[FaultSpec])
        except msgspec.MsgspecError as error:
            raise RuntimeError(f"{VARIABLE}: {error}") from error
        specs = read if isinstance(read, list) else [read]
        log.warning("%s is set: this worker fails on purpose", VARIABLE)
        return cls([spec for spec in specs if spec.instance in ("", instance_id)])

    async def hold(self, point: str) -> None:
        """Stop here if told to."""
        seconds = self._holds.get(point)
        if seconds is not None:
            log.warning("fault: holding at %s", point)
            await asyncio.sleep(seconds)

    def corrupt(self, staging: Staging) -> None:
        """Flip a byte of what is about to be sent if told to. Host memory only."""
        if self._corrupt:
            self._corrupt -= 1
            data = np.frombuffer(staging.buffer, np.uint8)  # type: ignore[call-overload]
            data[data.size // 2] ^= 0xFF
            log.warning("fault: corrupted a block")
