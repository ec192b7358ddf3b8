"""What goes over this machine's loopback, as someone on the link would see it."""

from __future__ import annotations

import socket
import threading
import time
from types import TracebackType
from typing import Final

_EVERY_PROTOCOL: Final = 3
_SNAP_BYTES: Final = 1 << 18


class Sniffer:
    """Captures within its block. Raises PermissionError without the right to."""

    def __init__(self, but_ports: frozenset[int]) -> None:
        """`but_ports`: TCP ports whose packets are left out."""
        self._but = but_ports
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
        self._socket.bind(("lo", 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
        self._socket.settimeout(0.1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seen = bytearray()

    def __enter__(self) -> Sniffer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()

    def wait_for(self, data: bytes) -> None:
        """Until it has seen this. Raises TimeoutError."""
        give_up_s = time.monotonic() + 20.0
        while data not in self.seen:
            if time.monotonic() > give_up_s:
                raise TimeoutError("not seen")
            time.sleep(0.01)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                frame = self._socket.recv(_SNAP_BYTES)
            except TimeoutError:
                continue
            # Ethernet, IPv4 without options, TCP.
            ports = {int.from_bytes(frame[34:36], "big"), int.from_bytes(frame[36:38], "big")}
            if not ports & self._but:
                self.seen += frame[54:]
