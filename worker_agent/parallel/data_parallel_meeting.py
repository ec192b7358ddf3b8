"""How the ranks of a deployment meet: all connect to rank 0, which waits until everyone has come.

Messages are one JSON object per line over TCP. The links stay open. They carry the calls of waves, and their
end tells that a rank is lost.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from tailrace.address import format_address
from tailrace.service.sockets import probe_when_idle

_log = logging.getLogger(__name__)

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


class JoinRefused(msgspec.Struct, tag="Refusal", frozen=True):
    """Rank 0 does not accept the rank that said hello. The tag is what every version sends."""

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


Message: TypeAlias = Hello | JoinRefused | Welcome | Start | Leave


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


_RETRY_S: Final = 0.5
_CONNECT_S: Final = 5.0
# Connections whose rank is not known yet; more are closed.
_MAX_STRANGERS: Final = 64


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a rank stands. `host` and `port`: where rank 0 listens.

    `settings`: those that must be equal on all ranks, for example sizes.
    """

    host: str
    port: int
    rank: int
    size: int
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """HOST:PORT where rank 0 listens."""
        return format_address(self.host, self.port)


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a rank has once all have come.

    `links`: to every other rank, by number, on rank 0; to rank 0 on the others. `ports`: see Welcome.
    """

    links: Mapping[int, Link]
    ports: Sequence[int]


class MeetingError(Exception):
    """The ranks did not meet; the message is one line that says which rank or setting is wrong."""


def meet(own: Rendezvous, ports: Sequence[int], deadline_s: float) -> Meeting:
    """Wait for all ranks, for at most `deadline_s` seconds. Raise MeetingError. Blocks.

    `ports`: see Welcome; only those of rank 0 count.
    """
    until_s = time.monotonic() + deadline_s
    if own.rank == 0:
        return _Host(own, deadline_s, until_s).gather(ports)
    return _visit(own, deadline_s, until_s)


class _Host:
    """Rank 0 while it waits for the others."""

    def __init__(self, own: Rendezvous, deadline_s: float, until_s: float) -> None:
        self._own = own
        self._deadline_s = deadline_s
        self._until_s = until_s
        self._links: dict[int, Link] = {}
        self._strangers: set[Link] = set()
        self._selector = selectors.DefaultSelector()

    def gather(self, ports: Sequence[int]) -> Meeting:
        own = self._own
        try:
            server = socket.create_server((own.host, own.port), family=_family(own))
        except OSError as error:
            raise MeetingError(
                f"rank 0 cannot listen on {own.address} (data_parallel_address, data_parallel_rpc_port): "
                f"{error.strerror or error}"
            ) from error
        with server, self._selector:
            # A connection may be gone again by the time it is accepted.
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)
            try:
                while len(self._links) < own.size - 1:
                    self._wait(server)
                for rank, link in self._links.items():
                    self._welcome(rank, link, ports)
            except MeetingError:
                self._close(self._links.values())
                raise
            finally:
                self._close(self._strangers)
        return Meeting(self._links, ports)

    def _wait(self, server: socket.socket) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            missing = [rank for rank in range(1, self._own.size) if rank not in self._links]
            ranks = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
            raise MeetingError(
                f"{ranks} of data_parallel_size {self._own.size} did not come to {self._own.address} "
                f"within {self._deadline_s:.0f} s"
            )
        for key, _ in self._selector.select(left_s):
            if key.fileobj is server:
                self._accept(server)
            elif isinstance(key.fileobj, Link):
                self._read(key.fileobj)

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, _ = server.accept()
        except (BlockingIOError, ConnectionError):
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            connection.close()
            return
        link = Link(connection)
        self._strangers.add(link)
        self._selector.register(link, selectors.EVENT_READ)

    def _read(self, link: Link) -> None:
        try:
            for message in link.receive():
                self._hear(link, message)
        except LinkLost as lost:
            self._drop(link, lost)

    def _hear(self, link: Link, message: Message) -> None:
        if not isinstance(message, Hello) or link not in self._strangers:
            raise LinkLost("sent something else than one hello")
        if reason := self._refusal(message):
            _log.warning("rank %d is refused: %s", message.rank, reason)
            link.send(JoinRefused(reason))
            raise LinkLost("was refused")
        self._strangers.discard(link)
        self._links[message.rank] = link
        _log.info("rank %d of %d has come", message.rank, self._own.size)

    def _refusal(self, hello: Hello) -> str:
        """Return why the rank cannot take part; empty if it can."""
        wrong = [
            f"{name} {hello.settings.get(name)} against {value} on rank 0"
            for name, value in self._own.settings.items()
            if hello.settings.get(name) != value
        ]
        if wrong:
            return "; ".join(wrong)
        if not 0 < hello.rank < self._own.size:
            return f"data_parallel_rank {hello.rank} is not one of 1 to {self._own.size - 1}"
        if hello.rank in self._links:
            return f"another worker is rank {hello.rank} already (data_parallel_rank)"
        return ""

    def _drop(self, link: Link, lost: LinkLost) -> None:
        self._selector.unregister(link)
        link.close()
        self._strangers.discard(link)
        for rank in [rank for rank, each in self._links.items() if each is link]:
            _log.warning("rank %d %s before all ranks had come", rank, lost)
            del self._links[rank]

    def _welcome(self, rank: int, link: Link, ports: Sequence[int]) -> None:
        try:
            link.send(Welcome(ports))
        except LinkLost as lost:
            raise MeetingError(f"rank {rank} {lost}, as all ranks had come") from lost

    @staticmethod
    def _close(links: Iterable[Link]) -> None:
        for link in links:
            link.close()


def _visit(own: Rendezvous, deadline_s: float, until_s: float) -> Meeting:
    """Connect to rank 0 and wait for its welcome; start again if it goes, as it may restart meanwhile."""
    last = "nobody listens"
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            link = Link(socket.create_connection((own.host, own.port), min(left_s, _CONNECT_S)))
        except OSError as error:
            last = str(error.strerror or error)
        else:
            try:
                link.send(Hello(own.rank, own.settings))
                return Meeting({0: link}, _await_welcome(link, until_s))
            except LinkLost as lost:
                last = f"rank 0 {lost}"
                link.close()
            except MeetingError:
                link.close()
                raise
        time.sleep(max(0.0, min(_RETRY_S, until_s - time.monotonic())))
    raise MeetingError(
        f"rank {own.rank} did not meet all {own.size} ranks at {own.address} (data_parallel_address, "
        f"data_parallel_rpc_port) within {deadline_s:.0f} s: {last}"
    )


def _await_welcome(link: Link, until_s: float) -> Sequence[int]:
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while (left_s := until_s - time.monotonic()) > 0:
            if not selector.select(left_s):
                break
            for message in link.receive():
                if isinstance(message, JoinRefused):
                    raise MeetingError(message.reason)
                if isinstance(message, Welcome):
                    return message.ports
                raise LinkLost("did not answer hello")
    raise LinkLost("waits for other ranks")


def _family(own: Rendezvous) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in own.host else socket.AF_INET


_JOIN_S: Final = 5.0


class RankPeers:
    """The links of one rank, and the thread that reads them.

    The callbacks are called on that thread: `on_start` with the number of a wave that a peer has started, and
    `on_lost` at most once, with a sentence about the rank that has gone.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        meeting: Meeting,
        on_start: Callable[[int], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._size = size
        self._links = dict(meeting.links)
        self._on_start = on_start
        self._on_lost = on_lost
        self._loss = ""
        self._leaving = False
        # Set once the others are told, because the thread closes the links.
        self._told = False
        self._lost = threading.Event()
        self._losing = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="data-parallel-peers", daemon=True)
        self._thread.start()

    def start(self, wave: int) -> None:
        """Call all other ranks to a wave that this one has started. Any thread."""
        self._send_all(Start(wave), but=self._rank)

    def lost_within(self, timeout_s: float) -> str:
        """Return which rank is lost, or an empty text if none is within `timeout_s`. Any thread; blocks."""
        self._lost.wait(timeout_s)
        return self._loss

    def leave(self, how: str) -> None:
        """Tell the others, unless another rank left first, that this rank `how` (`was stopped`), and end the
        thread. May be called again. Blocks for at most 5 s, plus 5 s for each peer that does not read."""
        with self._losing:
            if self._leaving:
                return
            self._leaving = True
            others = not self._loss
        if others:
            self._send_all(Leave(self._rank, how), but=self._rank)
        self._told = True
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    # ---- the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while not self._loss and not self._told:
                for key, _ in selector.select():
                    if isinstance(key.fileobj, Link):
                        self._read(key.data, key.fileobj)
        self._woken.close()
        for link in self._links.values():
            link.close()

    def _read(self, rank: int, link: Link) -> None:
        try:
            for message in link.receive():
                self._hear(rank, message)
        except LinkLost as lost:
            self._lose(Leave(rank, str(lost)), told_by=rank)

    def _hear(self, sender: int, message: Message) -> None:
        match message:
            case Start(wave):
                if self._rank == 0:
                    self._send_all(message, but=sender)
                self._on_start(wave)
            case Leave():
                self._lose(message, told_by=sender)
            case _:
                raise LinkLost(f"sent a {type(message).__name__.lower()} after the meeting")

    # ---- any thread

    def _send_all(self, message: Message, but: int) -> None:
        for rank, link in self._links.items():
            if rank == but:
                continue
            try:
                link.send(message)
            except LinkLost as lost:
                self._lose(Leave(rank, str(lost)), told_by=rank)

    def _lose(self, leave: Leave, told_by: int) -> None:
        with self._losing:
            if self._loss or self._leaving:
                return
            self._loss = (
                f"rank {leave.rank} of {self._size} of the data-parallel deployment {leave.how}; "
                "the other ranks cannot go on without it"
            )
        if self._rank == 0:
            self._send_all(leave, but=told_by)
        self._lost.set()
        self._on_lost(self._loss)
