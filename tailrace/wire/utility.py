"""Calls of the engine core's methods (get_supported_tasks, reset_prefix_cache, ...) and their answers."""

from __future__ import annotations

import time

import msgspec

from tailrace.wire.frames import Frames


class UtilityCall(msgspec.Struct, array_like=True, gc=False):
    """One call; call_id is any unsigned 64-bit number of the caller's."""

    client_index: int
    call_id: int
    method: str
    # A msgpack array.
    args: msgspec.Raw


_calls = msgspec.msgpack.Decoder(UtilityCall)
_encoder = msgspec.msgpack.Encoder()


def read_utility(frames: Frames) -> UtilityCall:
    """Decode a UTILITY's data frames. Raises msgspec.DecodeError."""
    return _calls.decode(frames[0])


def utility_result(call_id: int, result: object) -> list[bytes]:
    """The answer of a call that succeeded; `result` must be made of what msgpack knows."""
    # vLLM's UtilityResult is (type information or nil, value).
    return _answer([call_id, None, [None, result]])


def utility_failure(call_id: int, message: str) -> list[bytes]:
    """The answer of a call that failed; the caller raises an exception with this message."""
    return _answer([call_id, message, None])


def _answer(output: list[object]) -> list[bytes]:
    return [_encoder.encode([0, [], None, time.monotonic(), output, None, None, None, None])]
