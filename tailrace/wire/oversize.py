"""Takes outputs out of a message that is too large to be sent."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tailrace.wire.frames import Frames
from tailrace.wire.outputs import filter_outputs

_raw_list = msgspec.msgpack.Decoder(list[msgspec.Raw])


def shrink_outputs(frames: Frames, limit_bytes: int) -> tuple[list[bytes], list[int]]:
    """Take out the largest outputs until the rest has at most `limit_bytes`.

    Returns the message that is left and the positions of the outputs that were taken out, in ascending
    order. The auxiliary buffers of what was taken out become empty, so that the indices of the others
    stay right. Everything else stays byte for byte. Raises msgspec.DecodeError when this is no message of
    outputs.
    """
    excess = sum(map(len, frames)) - limit_bytes
    if excess <= 0:
        return list(frames), []
    outputs = _raw_list.decode(_raw_list.decode(frames[0])[1])
    buffers = [_buffers(msgspec.msgpack.decode(output), len(frames)) for output in outputs]
    sizes = [
        len(memoryview(output)) + sum(len(frames[index]) for index in used)
        for output, used in zip(outputs, buffers, strict=True)
    ]
    keep = [True] * len(outputs)
    for position in sorted(range(len(outputs)), key=lambda position: sizes[position], reverse=True):
        keep[position] = False
        excess -= sizes[position]
        if excess <= 0:
            break
    needed = set[int]().union(*(used for used, kept in zip(buffers, keep, strict=True) if kept))
    dropped = set[int]().union(*buffers) - needed
    left = filter_outputs(frames, keep)
    return (
        [b"" if index in dropped else frame for index, frame in enumerate(left)],
        [position for position, kept in enumerate(keep) if not kept],
    )


def _buffers(value: object, frames: int) -> set[int]:
    """Indices of the auxiliary buffers that a decoded output refers to: arrays are (dtype, shape, index)."""
    if isinstance(value, dict):
        return set[int]().union(*(_buffers(each, frames) for each in value.values()))
    if not isinstance(value, list | tuple):
        return set()
    if _is_array(value):
        index = value[2]
        return {index} if isinstance(index, int) and 0 < index < frames else set()
    return set[int]().union(*(_buffers(each, frames) for each in value if isinstance(each, list | dict)))


def _is_array(value: Sequence[object]) -> bool:
    return len(value) == 3 and isinstance(value[0], str) and isinstance(value[1], list)
