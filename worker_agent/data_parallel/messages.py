"""Messages between the ranks of a deployment, one JSON object per line over TCP, and their link."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from tailrace.service.retransmission import probe_when_idle

_MAX_LINE_BYTES: Final = 1 << 16
# A peer reads its links all the time, and messages are tens of bytes.
_SEND_DEADLINE_S: Final = 5.0
# A peer whose host or network has gone is noticed after this long; one whose process ends, at once.
_SILENCE_S: Final = 8
_PROBE_S: Final = 2


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A rank has come. `settings`: those that must be equal on all ranks."""

    rank: int
    settings: Mapping[str, str]


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """Rank 0 does not accept the rank that said hello."""

    reason: str


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """All ranks have come. `ports`: free ports of rank 0's host, for the ranks' process groups."""

    ports: Sequence[int]


class Start(msgspec.Struct, tag=True, frozen=True):
    """A rank has started this wave."""

    wave: int


class Leave(msgspec.Struct, tag=True, frozen=True):
    """A rank leaves, and the deployment ends. `how` completes the sentence `rank 1 ...`."""

    rank: int
    how: str


Message: TypeAlias = Hello | Refusal | Welcome | Start | Leave


class LinkLost(Exception):
    """The other end has gone, or has sent what is not a message; the message completes `rank 1 ...`."""


class Link:
    """A connection to another rank. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected TCP socket."""
        connection.settimeout(_SEND_DEADLINE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        probe_when_idle(connection, _PROBE_S, _PROBE_S, _SILENCE_S // _PROBE_S - 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)
        self._connection = connection
        self._sending = threading.Lock()
        self._received = b""

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Raise LinkLost if the other end has gone or does not read for 5 s."""
        line = msgspec.json.encode(message) + b"\n"
        try:
            with self._sending:
                self._connection.sendall(line)
        except OSError as error:
            raise LinkLost(_gone(error)) from error

    def receive(self) -> list[Message]:
        """Return the messages that have arrived in full; call when the selector says that there is something
        to read. Raise LinkLost."""
        try:
            data = self._connection.recv(_MAX_LINE_BYTES)
        except OSError as error:
            raise LinkLost(_gone(error)) from error
        if not data:
            raise LinkLost("has died")
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _MAX_LINE_BYTES:
            raise LinkLost("sent too long a message")
        try:
            return [msgspec.json.decode(line, type=Message) for line in lines]
        except msgspec.DecodeError as error:
            raise LinkLost(f"sent what is not a message: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _gone(error: OSError) -> str:
    if isinstance(error, ConnectionError):
        return "has died"
    return f"cannot be reached: {error.strerror or error}"
