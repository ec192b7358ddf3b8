"""Removal of outputs from a message that is too large."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tailrace.wire.outputs import EngineCoreOutput, encode_outputs, read_outputs, shrink_outputs

encode = msgspec.msgpack.encode


def message(inline: list[int], buffers: list[int]) -> list[bytes]:
    """Encode one output per entry, with this many inline bytes and this many in an auxiliary buffer."""
    outputs, frames = [], list[bytes]()
    for number, (inline_size, size) in enumerate(zip(inline, buffers, strict=True)):
        arrays: list[object] = [("<i4", [inline_size], msgspec.msgpack.Ext(3, b"i" * inline_size))]
        if size:
            frames.append(bytes([number % 256]) * size)
            arrays.append(("<f4", [1, size], len(frames)))
        outputs.append(
            EngineCoreOutput(f"r{number}", [number], new_logprobs=msgspec.Raw(encode([*arrays, None])))
        )
    return [*encode_outputs(outputs, [f"r{n}" for n in range(len(outputs))]), *frames]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3000)), max_size=8), st.integers(0, 9000))
def test_shrunk_message_fits_and_lacks_only_the_largest_outputs(
    sizes: list[tuple[int, int]], limit: int
) -> None:
    frames = message([inline_size for inline_size, _ in sizes], [buffer for _, buffer in sizes])
    shrunk, dropped = shrink_outputs(frames, limit)
    outputs = read_outputs(shrunk).outputs
    kept = [n for n in range(len(sizes)) if n not in dropped]
    assert [each.request_id for each in outputs] == [f"r{n}" for n in kept]
    assert sum(map(len, shrunk)) <= limit or len(kept) == 0
    if sum(map(len, frames)) <= limit:
        assert not dropped and shrunk == frames
    for output, number in zip(outputs, kept, strict=True):
        arrays = msgspec.msgpack.decode(output.new_logprobs)
        for _, shape, data in (each for each in arrays if each is not None):
            if isinstance(data, int):
                assert shrunk[data] == bytes([number % 256]) * shape[1]
    # No kept output is larger than any dropped one.
    total_sizes = [inline_size + buffer for inline_size, buffer in sizes]
    slack = 40
    if kept and dropped:
        assert max(total_sizes[n] for n in kept) <= min(total_sizes[n] for n in dropped) + slack
    finished = msgspec.msgpack.decode(shrunk[0])[5]
    assert (finished or []) == [f"r{n}" for n in kept]
