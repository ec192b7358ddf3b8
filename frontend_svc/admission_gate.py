"""Decides when new requests are refused before they begin."""

from __future__ import annotations

import asyncio
import logging

from frontend_svc.admission import AdmissionFlag

log = logging.getLogger(__name__)


class AdmissionGate:
    """Closes admission once no instance could take a request for `patience_s`; one that can opens it."""

    def __init__(self, flag: AdmissionFlag, patience_s: float) -> None:
        self._flag = flag
        self._patience_s = patience_s
        self._timer: asyncio.TimerHandle | None = None

    def update(self, usable: int) -> None:
        """Tell how many instances could take a request now."""
        if usable:
            self.cancel()
            self._flag.open()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._close)

    def cancel(self) -> None:
        """Forget the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        log.warning("no instance can take requests; new ones are refused")
        self._flag.close()
