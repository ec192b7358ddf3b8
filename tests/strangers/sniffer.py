"""Capture the traffic on this machine's loopback, as an observer on the link would."""

from __future__ import annotations

import socket
import threading
import time
from types import TracebackType
from typing import Final

_EVERY_PROTOCOL: Final = 3
_SNAP_BYTES: Final = 1 << 18


class Sniffer:
    """Captures packets for the block. Raise PermissionError without the right to capture."""

    def __init__(self, excluded_ports: frozenset[int]) -> None:
        """`excluded_ports`: TCP ports whose packets are ignored."""
        self._excluded = excluded_ports
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
        self._socket.bind(("lo", 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
        self._socket.settimeout(0.1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.captured_bytes = bytearray()

    def __enter__(self) -> Sniffer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self._socket.close()

    def wait_for(self, data: bytes) -> None:
        """Wait until these bytes are captured. Raise TimeoutError if they are not in time."""
        deadline_s = time.monotonic() + 20.0
        while data not in self.captured_bytes:
            if time.monotonic() > deadline_s:
                raise TimeoutError("not captured")
            time.sleep(0.01)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                frame = self._socket.recv(_SNAP_BYTES)
            except TimeoutError:
                continue
            # Ethernet, IPv4 without options, TCP.
            ports = {int.from_bytes(frame[34:36], "big"), int.from_bytes(frame[36:38], "big")}
            if not ports & self._excluded:
                self.captured_bytes += frame[54:]
