"""Decides when new requests are refused before they begin."""

from __future__ import annotations

import asyncio
import logging

from frontend_svc.admission import AdmissionFlag, AdmissionState

log = logging.getLogger(__name__)


class AdmissionGate:
    """Closes admission once no instance could take a request for `patience_s`, and while the front end is
    full."""

    def __init__(self, flag: AdmissionFlag, patience_s: float) -> None:
        self._flag = flag
        self._patience_s = patience_s
        self._timer: asyncio.TimerHandle | None = None
        self._without_instance = False
        self._full = False

    def update(self, usable: int) -> None:
        """Tell how many instances could take a request now."""
        if usable:
            self.cancel()
            self._without_instance = False
            self._apply()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._close)

    def update_full(self, full: bool) -> None:
        """Tell whether the front end carries as many requests as it may."""
        if full != self._full:
            self._full = full
            log.warning("%s", "full: new requests are refused" if full else "no longer full")
            self._apply()

    def cancel(self) -> None:
        """Forget the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        log.warning("no instance can take requests; new ones are refused")
        self._without_instance = True
        self._apply()

    def _apply(self) -> None:
        if self._without_instance:
            self._flag.set(AdmissionState.NO_INSTANCE)
        else:
            self._flag.set(AdmissionState.FULL if self._full else AdmissionState.OPEN)
