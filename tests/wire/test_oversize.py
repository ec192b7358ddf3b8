"""Outputs taken out of a message that is too large."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tailrace.wire import EngineCoreOutput, encode_outputs, read_outputs, shrink_outputs

encode = msgspec.msgpack.encode


def message(inline: list[int], buffers: list[int]) -> list[bytes]:
    """One output an entry: so many bytes of its own, and arrays in auxiliary buffers of so many (0: none)."""
    outputs, frames = [], list[bytes]()
    for number, (own, size) in enumerate(zip(inline, buffers, strict=True)):
        arrays: list[object] = [("<i4", [own], msgspec.msgpack.Ext(3, b"i" * own))]
        if size:
            frames.append(bytes([number % 256]) * size)
            arrays.append(("<f4", [1, size], len(frames)))
        outputs.append(
            EngineCoreOutput(f"r{number}", [number], new_logprobs=msgspec.Raw(encode([*arrays, None])))
        )
    return [*encode_outputs(outputs, [f"r{n}" for n in range(len(outputs))]), *frames]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3000)), max_size=8), st.integers(0, 9000))
def test_what_is_left_fits_is_whole_and_lacks_only_the_largest(
    sizes: list[tuple[int, int]], limit: int
) -> None:
    frames = message([own for own, _ in sizes], [buffer for _, buffer in sizes])
    left, dropped = shrink_outputs(frames, limit)
    outputs = read_outputs(left).outputs
    kept = [n for n in range(len(sizes)) if n not in dropped]
    assert [each.request_id for each in outputs] == [f"r{n}" for n in kept]
    assert sum(map(len, left)) <= limit or len(kept) == 0
    if sum(map(len, frames)) <= limit:
        assert not dropped and left == frames
    for output, number in zip(outputs, kept, strict=True):
        arrays = msgspec.msgpack.decode(output.new_logprobs)
        for _, shape, data in (each for each in arrays if each is not None):
            if isinstance(data, int):
                assert left[data] == bytes([number % 256]) * shape[1]
    # Whatever is kept is no larger than whatever was taken out.
    whole = [own + buffer for own, buffer in sizes]
    slack = 40
    if kept and dropped:
        assert max(whole[n] for n in kept) <= min(whole[n] for n in dropped) + slack
    finished = msgspec.msgpack.decode(left[0])[5]
    assert (finished or []) == [f"r{n}" for n in kept]
