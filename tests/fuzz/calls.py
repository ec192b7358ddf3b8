"""Call every gRPC method of a cluster with inputs that no client of ours sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

import grpc
from google.protobuf.descriptor import Descriptor

from tailrace.v1 import (
    admin_pb2,
    bidask_pb2,
    cache_pb2,
    migration_pb2,
    monitor_pb2,
    scheduler_pb2,
    worker_pb2,
)
from tests.fuzz.messages import make_input

_CALL_S: Final = 2.0
# In a stream of requests.
_MAX_REQUESTS: Final = 4
# Read from a stream of replies.
_MAX_REPLIES: Final = 20

SERVER_ERRORS: Final = frozenset(
    {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
)
"""Statuses that mean a bug in the server."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method and its request type."""

    path: str
    request: Descriptor


@dataclass(frozen=True, slots=True)
class Finding:
    """An input to which a server replied with a server error."""

    method: str
    status: str
    details: str
    # In hex, one per message.
    requests: tuple[str, ...]


@dataclass(slots=True)
class Tally:
    """Results of a method's inputs."""

    statuses: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


METHODS: Final[tuple[Method, ...]] = tuple(
    Method(f"/{service.full_name}/{method.name}", method.input_type)
    for module in (admin_pb2, bidask_pb2, cache_pb2, migration_pb2, monitor_pb2, scheduler_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)


def _raw(data: bytes) -> bytes:
    return data


def is_served(channel: grpc.Channel, method: Method) -> bool:
    """Return whether the server has the method."""
    call = channel.stream_stream(method.path, request_serializer=_raw, response_deserializer=_raw)
    status, _ = _call_status(call, [b""], _CALL_S)
    return status is not grpc.StatusCode.UNIMPLEMENTED


def fuzz_method(
    channel: grpc.Channel,
    method: Method,
    inputs: int,
    random: Random,
    names: Sequence[str],
    call_s: float = _CALL_S,
) -> Tally:
    """Call a method with so many inputs, one at a time. `call_s`: deadline of each call, also of replies that
    stream without end."""
    call = channel.stream_stream(method.path, request_serializer=_raw, response_deserializer=_raw)
    tally = Tally()
    for _ in range(inputs):
        requests = [
            make_input(random, method.request, names) for _ in range(random.randint(1, _MAX_REQUESTS))
        ]
        status, details = _call_status(call, requests, call_s)
        tally.statuses[status.name] += 1
        if status in SERVER_ERRORS:
            sent = tuple(request[:2_000].hex() for request in requests)
            tally.findings.append(Finding(method.path, status.name, details[:500], sent))
    return tally


def _call_status(
    call: grpc.StreamStreamMultiCallable[bytes, bytes], requests: Sequence[bytes], call_s: float
) -> tuple[grpc.StatusCode, str]:
    """Return status and details of a call; OK if it is still streaming after the first replies."""
    stream: Iterator[bytes] = call(iter(requests), timeout=call_s)
    assert isinstance(stream, grpc.Call)
    try:
        for number, _ in enumerate(stream):
            if number >= _MAX_REPLIES:
                return grpc.StatusCode.OK, ""
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return error.code(), error.details() or ""
    finally:
        stream.cancel()
    return grpc.StatusCode.OK, ""
