"""The message stream between front ends and workers, with bytes that no front end sends."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from random import Random
from typing import Final

import msgspec

from benchmarks.fuzz.messages import damaged, noise, random_message
from tailrace.records import InstanceRecord
from tailrace.store.store import Store
from tailrace.v1 import worker_pb2

_CONNECT_S: Final = 5.0
# To read what comes back, before the connection is left.
_LISTEN_S: Final = 0.05
_LENGTH_BYTES: Final = 4
_MOST_MESSAGES: Final = 8


async def stream_addresses(etcd: str, workers: Sequence[str]) -> list[str]:
    """Where the workers' message streams are."""
    store = await Store.connect([etcd], "default")
    try:
        values = [await store.get(f"instances/{name}") for name in workers]
    finally:
        await store.close()
    found = [msgspec.json.decode(value, type=InstanceRecord) for value in values if value is not None]
    assert len(found) == len(workers), "a worker has no record in etcd"
    return [record.stream_address for record in found]


def fuzz_stream(address: str, connections: int, random: Random, names: Sequence[str]) -> int:
    """Open so many connections, one after the other; how many messages were sent. Raises OSError when the
    worker takes no connection any more."""
    host, _, port = address.rpartition(":")
    sent = 0
    for _ in range(connections):
        with socket.create_connection((host, int(port)), _CONNECT_S) as connection:
            connection.settimeout(_LISTEN_S)
            sent += _speak(connection, random, names)
    return sent


def _speak(connection: socket.socket, random: Random, names: Sequence[str]) -> int:
    messages = _messages(random, names)
    # Closed by the worker in mid-conversation, as it should where no sense is left; or it says nothing.
    with contextlib.suppress(ConnectionError, TimeoutError):
        for message in messages:
            connection.sendall(message)
        connection.recv(65_536)
    return len(messages)


def _messages(random: Random, names: Sequence[str]) -> list[bytes]:
    match random.randrange(4):
        case 0:
            return [noise(random)]
        case 1:
            # A length that nothing follows.
            return [random.choice((0, 1, 2**20, 2**31, 2**32 - 1)).to_bytes(_LENGTH_BYTES, "little")]
        case 2:
            return [_framed(damaged(random, _message(random, names))) for _ in range(_MOST_MESSAGES)]
        case _:
            hello = worker_pb2.AttachUp(
                hello=worker_pb2.FrontendHello(frontend_id="fuzz", incarnation=noise(random).hex(), attempt=1)
            )
            count = random.randint(1, _MOST_MESSAGES)
            return [
                _framed(hello.SerializeToString()),
                *(_framed(_message(random, names)) for _ in range(count)),
            ]


def _message(random: Random, names: Sequence[str]) -> bytes:
    return random_message(random, worker_pb2.AttachUp.DESCRIPTOR, names).SerializeToString()


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message
