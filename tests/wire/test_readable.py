"""What API servers can read of outputs, and what not."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from tailrace.wire.outputs import EngineCoreOutput, encode_outputs
from tailrace.wire.readable import check_outputs

RAW_VIEW: Final = 3
NO_ARRAYS: Final[tuple[object, ...]] = (1, "x", b"x", {})


def array(values: Any, kind: str, name: str = "") -> tuple[str, list[int], msgspec.msgpack.Ext]:
    """Encode an array as vLLM does. `name`: its type's, if not numpy's."""
    numbers = np.array(values, kind)
    return name or numbers.dtype.str, list(numbers.shape), msgspec.msgpack.Ext(RAW_VIEW, numbers.tobytes())


def message(field: str, value: object, *aux: bytes) -> list[bytes]:
    """Encode a step of three outputs, of which the second has this field."""
    raw: Any = msgspec.Raw(msgspec.msgpack.encode(value))
    outputs = [
        EngineCoreOutput("a", [1]),
        EngineCoreOutput("b", [2], **{field: raw}),
        EngineCoreOutput("c", [3]),
    ]
    return [*encode_outputs(outputs), *aux]


def logprobs(
    ids: Any = ((5, 6), (7, 8)),
    values: Any = ((-0.5, -math.inf), (-1.0, -2.0)),
    ranks: Any = (1, 2),
    kinds: tuple[str, str, str] = ("<i8", "<f4", "<i8"),
) -> list[object]:
    """Encode LogprobsLists of two tokens."""
    return [*(array(each, kind) for each, kind in zip((ids, values, ranks), kinds, strict=True)), None]


def tensors() -> list[object]:
    """Encode LogprobsTensors of two tokens."""
    return [
        array([[5, 6], [7, 8]], "<i4", "int32"),
        array([[-0.5, -math.inf], [-1.0, -2.0]], "<f4", "float32"),
        array([1, 2], "<i8", "int64"),
        None,
        None,
    ]


LARGE: Final = np.arange(4_000, dtype="<i8").reshape(1_000, 4)
LARGE_VALUES: Final = -LARGE.astype("<f4")
LARGE_RANKS: Final = np.ones(1_000, "<i8")


def large(ids: Any = LARGE, values: Any = LARGE_VALUES, ranks: Any = LARGE_RANKS) -> list[bytes]:
    """Encode log-probabilities with their arrays in frames of their own."""
    arrays = [(each.dtype.str, list(each.shape), at) for at, each in enumerate((ids, values, ranks), 1)]
    return message("new_logprobs", [*arrays, None], *(each.tobytes() for each in (ids, values, ranks)))


def changed(values: Any, value: float) -> Any:
    """Return a copy whose last element is this one."""
    copy = values.copy()
    copy.flat[-1] = value
    return copy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("new_logprobs", logprobs()),
        ("new_logprobs", logprobs(kinds=("<i4", "<f4", "<i4"))),
        ("new_logprobs", logprobs()[:3]),
        ("new_prompt_logprobs_tensors", tensors()),
        ("new_prompt_logprobs_tensors", tensors()[:3]),
        ("pooling_output", array([0.5], "<f2", "bfloat16")),
        ("events", [{"type": kind, "timestamp": 1.5} for kind in (1, 2, 3)]),
        ("events", []),
        ("kv_transfer_params", {"a": [1, None, {}]}),
        ("routed_experts", array([[[1]]], "<i2")),
        ("new_sampling_mask", [array([1, 2], "<i4"), None, None]),
        ("new_sampling_mask", [array([1, 2], "<i4"), array([0, 1, 2], "<i8")]),
        ("spec_decode_metrics", {"num_spec_tokens": 2, "histogram": [1, 0, 4]}),
        ("prompt_token_id_logprobs", array([[-1.0]], "<f4", "float32")),
    ],
)
def test_what_vllm_sends_is_readable(field: str, value: object) -> None:
    check_outputs(message(field, value))


def test_arrays_in_frames_of_their_own_are_readable() -> None:
    check_outputs(large())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in ("new_logprobs", "events", "pooling_output") for value in NO_ARRAYS),
        ("new_logprobs", []),
        ("new_logprobs", logprobs()[:2]),
        ("new_logprobs", [*logprobs(), None]),
        ("new_logprobs", [*logprobs()[:3], [0, 2]]),
        # Types that only one of the servers, or neither, knows.
        ("new_logprobs", logprobs(kinds=("<f4", "<f4", "<i8"))),
        ("new_logprobs", logprobs(kinds=("<i8", "<f8", "<i8"))),
        ("new_logprobs", logprobs(kinds=("<i8", "<f4", "<u8"))),
        ("new_logprobs", [["O", [2, 2], 1], *logprobs()[1:]]),
        ("new_logprobs", tensors()[:4]),
        ("new_prompt_logprobs_tensors", logprobs()),
        # Shapes.
        ("new_logprobs", logprobs(ids=(5, 6))),
        ("new_logprobs", logprobs(ids=((5,), (7,)))),
        ("new_logprobs", logprobs(ranks=(1,))),
        ("new_logprobs", logprobs(ids=((), ()), values=((), ()))),
        ("new_logprobs", [["<i8", [2, -2], msgspec.msgpack.Ext(RAW_VIEW, b"")], *logprobs()[1:]]),
        ("new_logprobs", [["<i8", 4, msgspec.msgpack.Ext(RAW_VIEW, b"8" * 32)], *logprobs()[1:]]),
        # Sizes and frames.
        ("new_logprobs", [["<i8", [2, 2], msgspec.msgpack.Ext(RAW_VIEW, b"8" * 31)], *logprobs()[1:]]),
        ("new_logprobs", [["<i8", [2, 2], b"8" * 32], *logprobs()[1:]]),
        ("new_logprobs", [["<i8", [2, 2], msgspec.msgpack.Ext(1, b"8" * 32)], *logprobs()[1:]]),
        *(("new_logprobs", [["<i8", [2, 2], frame], *logprobs()[1:]]) for frame in (-1, 0, 1, True, 2**40)),
        # Values.
        ("new_logprobs", logprobs(ids=((5, 6), (7, -1)))),
        ("new_logprobs", logprobs(ids=((5, 6), (7, 2**32)))),
        ("new_logprobs", logprobs(ranks=(1, 0))),
        ("new_logprobs", logprobs(values=((-1.0, math.nan), (-1.0, -2.0)))),
        ("new_logprobs", logprobs(values=((-1.0, math.inf), (-1.0, -math.inf)))),
        ("events", [{"type": 0, "timestamp": 1.5}]),
        ("events", [{"type": 1}]),
        ("events", [{"type": 1, "timestamp": math.nan}]),
        ("events", [{"type": 1, "timestamp": None}]),
        ("pooling_output", ["float32", [2], msgspec.msgpack.Ext(RAW_VIEW, b"1234")]),
        ("pooling_output", array([1.0], "<f4")),
        ("kv_transfer_params", [1]),
        ("kv_transfer_params", {"a": msgspec.msgpack.Ext(1, b"pickle")}),
        ("routed_experts", array([1], "<i2", "int16")),
        ("new_sampling_mask", [array([[1]], "<i4")]),
        ("new_sampling_mask", [array([1], "<i4"), None, [0, 1]]),
        ("spec_decode_metrics", {"histogram": []}),
        ("prompt_token_id_logprobs", [1]),
    ],
)
def test_garbage_is_not_readable(field: str, value: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        check_outputs(message(field, value))


@pytest.mark.parametrize(
    "frames",
    [
        large(ids=changed(LARGE, -1)),
        large(ids=changed(LARGE, 2**32)),
        large(ranks=changed(LARGE_RANKS, 0)),
        large(values=changed(LARGE_VALUES, math.nan)),
        large(values=changed(LARGE_VALUES, math.inf)),
        large()[:3],
        [*large()[:3], large()[3][:-1]],
    ],
    ids=range(7),
)
def test_garbage_in_large_arrays_is_not_readable(frames: list[bytes]) -> None:
    with pytest.raises(msgspec.DecodeError):
        check_outputs(frames)
    check_outputs(large())
