"""Whether API servers can read a message of outputs. One that cannot gives all of its requests up.

The rules are those of vLLM's Python API server and of vllm-rs together. What most outputs do not have costs
them nothing: arrays are looked at where there are any.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType
from typing import Annotated, Any, Final

import msgspec

from tailrace.wire.outputs import FinishReason
from tailrace.wire.requests import Frames, head_frame

_RAW_VIEW: Final = 3
"""vLLM's extension type of an array's bytes inside the message; others are pickles."""
_SMALL_BYTES: Final = 2_048
"""Python reads so much before numpy has begun."""
_MAX_U32: Final = 2**32 - 1
# Types of arrays by their names on the wire, with the bytes of an element: numpy's, then torch's.
_ARRAYS: Final = {
    "|b1": 1,
    "|i1": 1,
    "|u1": 1,
    **{f"<{kind}{size}": size for kind in "iuf" for size in (2, 4, 8)},
}
_TENSORS: Final = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float64", "int64"), 8),
}

_U32 = Annotated[int, msgspec.Meta(ge=0, le=_MAX_U32)]
# Finite.
_Seconds = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]


class _Logprobs:
    """LogprobsLists: ids, log-probabilities and ranks, one row per token."""

    ids = frozenset({"<i4", "<i8"})
    logprobs = frozenset({"<f4"})
    types = _ARRAYS
    # Of the tuple; what follows the ranks is for several requests.
    longest = 4


class _PromptLogprobs(_Logprobs):
    """LogprobsTensors: the same."""

    ids = frozenset({"int32", "int64"})
    logprobs = frozenset({"float32"})
    types = _TENSORS
    longest = 5


class _Array:
    """A numpy array."""


class _Tensor:
    """A torch tensor."""


class _Mask:
    """SamplingMaskLists."""


class _Event(msgspec.Struct, gc=False):
    type: Annotated[int, msgspec.Meta(ge=1, le=3)]
    timestamp: _Seconds


class _SpecDecodeMetrics(msgspec.Struct, gc=False):
    num_spec_tokens: int
    histogram: list[int] = []
    num_draft_tokens: int = 0
    per_step_accepted: list[int] = []
    per_step_drafted: list[int] = []


class _Output(msgspec.Struct, array_like=True, gc=False):
    """One output, as narrow as the narrower of the API servers reads it."""

    request_id: str
    new_token_ids: list[_U32]
    new_logprobs: _Logprobs | None = None
    new_prompt_logprobs_tensors: _PromptLogprobs | None = None
    pooling_output: _Tensor | None = None
    finish_reason: FinishReason | None = None
    stop_reason: _U32 | str | None = None
    events: list[_Event] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: dict[str, _U32] | None = None
    routed_experts: _Array | None = None
    num_nans_in_logits: _U32 = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: _Mask | None = None
    spec_decode_metrics: _SpecDecodeMetrics | None = None
    prompt_token_id_logprobs: _Tensor | None = None


class _Outputs(msgspec.Struct, array_like=True, gc=False):
    """One step's outputs. The statistics of an engine are its front end's to tell."""

    engine_index: _U32
    outputs: list[_Output]
    scheduler_stats: None = None
    timestamp: _Seconds = 0.0
    utility_output: None = None
    finished_requests: list[str] | None = None
    wave_complete: _U32 | None = None
    start_wave: _U32 | None = None
    weight_version: str | None = None


def check_outputs(frames: Frames) -> None:
    """Raise msgspec.DecodeError unless API servers can read this message of outputs."""
    _arrays.frames = frames
    try:
        _readable.decode(head_frame(frames))
    finally:
        _arrays.frames = ()


class _Arrays:
    """Check the arrays of the message whose frames these are."""

    def __init__(self) -> None:
        self.frames: Frames = ()

    def check(self, kind: type, value: Any) -> object:
        """Check a value of this type; see msgspec's `dec_hook`. Raise ValueError, which becomes a
        msgspec.ValidationError."""
        if issubclass(kind, _Logprobs):
            self._check_logprobs(kind, value)
        elif kind is _Mask:
            self._check_mask(value)
        else:
            self._bytes(value, _TENSORS if kind is _Tensor else _ARRAYS)
        return _checked[kind]

    def _check_logprobs(self, kind: type[_Logprobs], value: Any) -> None:
        _require_tuple(value, 3, kind.longest)
        ids, ids_type, shape = self._bytes(value[0], kind.types)
        logprobs, logprobs_type, logprobs_shape = self._bytes(value[1], kind.types)
        ranks, ranks_type, ranks_shape = self._bytes(value[2], kind.types)
        if ids_type not in kind.ids or logprobs_type not in kind.logprobs or ranks_type not in kind.ids:
            raise ValueError(f"log-probabilities of types {ids_type}, {logprobs_type} and {ranks_type}")
        if len(shape) != 2 or shape != logprobs_shape or ranks_shape != shape[:1] or not shape[1]:
            raise ValueError(f"log-probabilities of shapes {shape}, {logprobs_shape} and {ranks_shape}")
        if not shape[0]:
            return
        lowest, highest = self._range(ids, kind.types[ids_type])
        best, worst = self._range(ranks, kind.types[ranks_type])
        if lowest < 0 or highest > _MAX_U32 or best < 1 or worst > _MAX_U32:
            raise ValueError("a token id or a rank that is none")
        # Of an impossible token it is -inf.
        if not self._sum(logprobs) < math.inf:
            raise ValueError("a log-probability that JSON cannot express")

    @staticmethod
    def _range(data: Any, element_bytes: int) -> tuple[int, int]:
        if len(data) <= _SMALL_BYTES:
            values = memoryview(data).cast("i" if element_bytes == 4 else "q")
            return min(values), max(values)
        array = _numpy().frombuffer(data, f"<i{element_bytes}")
        return int(array.min()), int(array.max())

    @staticmethod
    def _sum(data: Any) -> float:
        """Return the sum of float32s, which is not a number if one of them is not."""
        if len(data) <= _SMALL_BYTES:
            return sum(memoryview(data).cast("f"))
        return float(_numpy().frombuffer(data, "<f4").sum(dtype="f8"))

    def _check_mask(self, value: Any) -> None:
        _require_tuple(value, 1, 3, arrays=2)
        for each in value[:2]:
            if each is not None and len(self._bytes(each, _ARRAYS)[2]) != 1:
                raise ValueError("a sampling mask's array that is not a list")

    def _bytes(self, value: Any, types: dict[str, int]) -> tuple[Any, str, list[int]]:
        """Return an array's bytes, type and shape; `types`: those that it may have."""
        if not isinstance(value, list) or len(value) != 3:
            raise ValueError("not an array")
        name, shape, data = value
        size = types.get(name) if isinstance(name, str) else None
        if size is None:
            raise ValueError(f"an array of {name!r:.40}")
        if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
            raise ValueError("an array's shape that is none")
        if type(data) is int:
            if not 0 < data < len(self.frames):
                raise ValueError(f"an array in frame {data} of {len(self.frames)}")
            data = self.frames[data]
        elif not isinstance(data, memoryview):
            raise ValueError("an array without bytes")
        if len(data) != math.prod(shape) * size:
            raise ValueError(f"an array of shape {shape} in {len(data)} bytes")
        return data, name, shape


def _require_tuple(value: Any, shortest: int, longest: int, arrays: int = 3) -> None:
    """Raise ValueError unless this is a tuple of so many values, of which those after the arrays are None."""
    if not isinstance(value, list) or not shortest <= len(value) <= longest:
        raise ValueError(f"not {shortest} to {longest} values")
    if any(each is not None for each in value[arrays:]):
        raise ValueError("what is told of several requests")


@cache
def _numpy() -> ModuleType:
    # It would be a good part of a front end's start, for what most never see.
    import numpy

    return numpy


def _raw_view(code: int, data: memoryview) -> memoryview:
    if code != _RAW_VIEW:
        raise msgspec.ValidationError(f"an extension of type {code}")
    return data


_checked: Final[dict[type, object]] = {
    kind: kind() for kind in (_Logprobs, _PromptLogprobs, _Array, _Tensor, _Mask)
}
_arrays: Final = _Arrays()
_readable = msgspec.msgpack.Decoder(_Outputs, dec_hook=_arrays.check, ext_hook=_raw_view)
