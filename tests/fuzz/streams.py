"""Send bytes that no front end sends to the workers' message streams."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from random import Random
from typing import Final

import msgspec

from tailrace.records import InstanceRecord
from tailrace.store.store import Store
from tailrace.v1 import worker_pb2
from tests.fuzz.messages import damage, noise, random_message
from tests.waiting import WAIT_S

# How long to wait for a reply before closing the connection.
_READ_S: Final = 0.05
_LENGTH_BYTES: Final = 4
_MAX_MESSAGES: Final = 8


async def stream_addresses(etcd: str, workers: Sequence[str]) -> list[str]:
    """Return the addresses of the workers' message streams."""
    store = await Store.connect([etcd], "default")
    try:
        values = [await store.get(f"instances/{name}") for name in workers]
    finally:
        await store.close()
    found = [msgspec.json.decode(value, type=InstanceRecord) for value in values if value is not None]
    assert len(found) == len(workers), "a worker has no record in etcd"
    return [record.stream_address for record in found]


def fuzz_stream(address: str, connections: int, random: Random, names: Sequence[str]) -> int:
    """Open so many connections, one at a time; return how many messages were sent. Raise OSError if the
    worker accepts no more connections."""
    host, _, port = address.rpartition(":")
    sent = 0
    for _ in range(connections):
        with socket.create_connection((host, int(port)), WAIT_S) as connection:
            connection.settimeout(_READ_S)
            sent += _send_random(connection, random, names)
    return sent


def _send_random(connection: socket.socket, random: Random, names: Sequence[str]) -> int:
    messages = _messages(random, names)
    # The worker closes the connection on invalid data, or does not reply.
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
            # A length without data.
            return [random.choice((0, 1, 2**20, 2**31, 2**32 - 1)).to_bytes(_LENGTH_BYTES, "little")]
        case 2:
            return [_frame(damage(random, _message(random, names))) for _ in range(_MAX_MESSAGES)]
        case _:
            hello = worker_pb2.AttachUp(
                hello=worker_pb2.FrontendHello(frontend_id="fuzz", incarnation=noise(random).hex(), attempt=1)
            )
            count = random.randint(1, _MAX_MESSAGES)
            return [
                _frame(hello.SerializeToString()),
                *(_frame(_message(random, names)) for _ in range(count)),
            ]


def _message(random: Random, names: Sequence[str]) -> bytes:
    return random_message(random, worker_pb2.AttachUp.DESCRIPTOR, names).SerializeToString()


def _frame(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message
