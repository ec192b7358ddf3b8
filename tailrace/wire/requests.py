"""API server to engine core: requests, aborts, and calls of the engine core's methods."""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

Frames = Sequence[bytes]
"""Frame 0 is msgpack. An array of 256 bytes or more is in it as (dtype, shape, i), its bytes in frame i."""


def head_frame(frames: Frames) -> bytes:
    """Return frame 0. Raise msgspec.DecodeError if there is none."""
    if not frames:
        raise msgspec.DecodeError("the message has no frames")
    return frames[0]


_NIL: Final = b"\xc0"
_EMPTY_ARRAY: Final = b"\x90"
OURS: Final = "tailrace_"
"""Extra arguments whose names begin so are Tailrace's; all others are those of vLLM and its plugins."""
_PACE: Final = "tailrace_pace_tpot_ms"
# Slower than anybody reads.
_PACE_MAX_MS: Final = 60_000.0
# Characters of a wrong value that its refusal repeats.
_SHOWN_MAX: Final = 40


# Positions in EngineCoreRequest.
_CACHE_SALT: Final = 7
_PRIORITY: Final = 13
_TRACE_HEADERS: Final = 14
_EXTERNAL_REQ_ID: Final = 16
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# What everybody has to pass on; more may be dropped.
_TRACESTATE_MAX: Final = 512


class RequestType(bytes, enum.Enum):
    """First frame of every message to the engine core."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"


class SamplingParams(
    msgspec.Struct,
    gc=False,
    rename={"eos_token_id": "_eos_token_id", "all_stop_token_ids": "_all_stop_token_ids"},
):
    """The part of vLLM's SamplingParams (a msgpack map) that is read outside the engine."""

    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    eos_token_id: int | None = None
    all_stop_token_ids: list[int] = []
    # A map that vLLM passes on unread; nil if there is none.
    extra_args: msgspec.Raw = msgspec.Raw(b"\xc0")


_PromptT = TypeVar("_PromptT")
_MediaT = TypeVar("_MediaT")
_SamplingT = TypeVar("_SamplingT")
_AdapterT = TypeVar("_AdapterT")


class RequestFields(
    msgspec.Struct, Generic[_PromptT, _MediaT, _SamplingT, _AdapterT], array_like=True, gc=False
):
    """The fields of vLLM's EngineCoreRequest. A reader says how far it decodes the large ones."""

    request_id: str
    prompt_token_ids: _PromptT
    mm_features: _MediaT
    sampling_params: _SamplingT
    pooling_params: msgspec.Raw
    arrival_time: float
    lora_request: _AdapterT
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"\xc0")
    prompt_is_token_ids: msgspec.Raw = msgspec.Raw(b"\xc0")
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: msgspec.Raw = msgspec.Raw(b"\xc0")
    abort_immediately: bool = False
    session_id: str | None = None


class EngineCoreRequest(
    RequestFields[list[int] | None, msgspec.Raw, SamplingParams | None, msgspec.Raw],
    array_like=True,
    gc=False,
):
    """A complete request, except for the tensors of multi-modal inputs and embeddings."""


class _Lengths(msgspec.Struct, gc=False):
    max_tokens: int | None = 16
    min_tokens: int = 0
    extra_args: msgspec.Raw = msgspec.Raw(b"\xc0")


_Head = RequestFields[msgspec.Raw, msgspec.Raw, _Lengths | None, msgspec.Raw]


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """What a front end needs to know of each request. Lengths in tokens."""

    request_id: str
    # 0 when the prompt is given as embeddings.
    prompt_tokens: int
    # None: until the model's longest length, or a pooling request.
    max_tokens: int | None
    min_tokens: int
    # False: a pooling request, which has no stream of tokens.
    generates: bool
    # It names a LoRA adapter.
    adapter: bool
    client_index: int
    priority: int
    # Seconds since the epoch.
    arrival_time: float
    trace_headers: dict[str, str] | None
    # The id that the user sees or gave.
    external_req_id: str | None
    # Whether the prompt already ends the reasoning; None: unknown.
    reasoning_ended: bool | None
    # The conversation, as the user calls it.
    session_id: str | None
    # Milliseconds a token at which the user wants to be shown the answer (`tailrace_pace_tpot_ms` among the
    # sampling parameters' extra_args, which are `vllm_xargs` over HTTP); 0: at once; None: not said.
    pace_tpot_ms: float | None
    # What is wrong with Tailrace's extra arguments, for the user; empty: nothing.
    wrong_extra: str = ""
    # By which its prompt is told apart from others in prefix caches.
    cache_salt: str | None = None
    # Whether images or other media belong to its prompt.
    media: bool = False


_raw_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
_headers = msgspec.msgpack.Decoder(dict[str, str] | None)
_extras = msgspec.msgpack.Decoder(dict[str, msgspec.Raw] | None)
_heads = msgspec.msgpack.Decoder(_Head)
_requests = msgspec.msgpack.Decoder(EngineCoreRequest)
_aborts = msgspec.msgpack.Decoder(list[str])


def read_request(frames: Frames) -> RequestHead:
    """Read the head of an ADD's data frames; the prompt is counted, not decoded.

    Raise msgspec.DecodeError (msgspec.ValidationError among them) if it is not a request.
    """
    head = _heads.decode(head_frame(frames))
    sampling = head.sampling_params
    pace_tpot_ms, wrong_extra = (None, "") if sampling is None else _read_extras(sampling.extra_args)
    return RequestHead(
        request_id=head.request_id,
        prompt_tokens=_array_length(bytes(memoryview(head.prompt_token_ids)[:5])),
        max_tokens=sampling.max_tokens if sampling is not None else None,
        min_tokens=sampling.min_tokens if sampling is not None else 0,
        generates=sampling is not None,
        adapter=bytes(memoryview(head.lora_request)[:1]) != _NIL,
        client_index=head.client_index,
        priority=head.priority,
        arrival_time=head.arrival_time,
        trace_headers=head.trace_headers,
        external_req_id=head.external_req_id,
        reasoning_ended=head.reasoning_ended,
        session_id=head.session_id,
        pace_tpot_ms=pace_tpot_ms,
        wrong_extra=wrong_extra,
        cache_salt=head.cache_salt,
        media=bytes(memoryview(head.mm_features)[:1]) not in (_NIL, _EMPTY_ARRAY),
    )


class OfTenant(NamedTuple):
    """What a request's tenant decides, and not its client."""

    cache_salt: str
    priority: int


def for_engines(frames: Frames, request_id: str, tenant: OfTenant | None = None) -> list[bytes]:
    """Return an ADD's data frames for engines: under this id, and without what is the API server's own.

    What is left out is the id that the user chose, and all trace headers but a valid trace context: an engine
    repeats them with every token. `tenant`: None if the API server has set its fields. Everything else stays
    byte for byte. Raise msgspec.DecodeError.
    """
    fields: list[msgspec.Raw | str | int | dict[str, str] | None] = [*_raw_list.decode(head_frame(frames))]
    fields[0] = request_id
    if tenant is not None:
        fields[_CACHE_SALT], fields[_PRIORITY] = tenant
    if len(fields) > _TRACE_HEADERS:
        fields[_TRACE_HEADERS] = trace_context(_headers.decode(fields[_TRACE_HEADERS])) or None  # type: ignore[arg-type]
    if len(fields) > _EXTERNAL_REQ_ID:
        fields[_EXTERNAL_REQ_ID] = None
    return [_encoder.encode(fields), *frames[1:]]


def trace_context(headers: dict[str, str] | None) -> dict[str, str]:
    """Return the W3C trace context in these headers; what is not valid is left out, as W3C asks for.

    https://www.w3.org/TR/trace-context/
    """
    headers = headers or {}
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if not _TRACEPARENT.fullmatch(parent):
        return {}
    keeps_state = state and len(state) <= _TRACESTATE_MAX and state.isprintable()
    return {"traceparent": parent, "tracestate": state} if keeps_state else {"traceparent": parent}


def read_full_request(frames: Frames) -> EngineCoreRequest:
    """Decode an ADD's data frames. Raise msgspec.DecodeError if it is not a request."""
    return _requests.decode(head_frame(frames))


def read_abort(frames: Frames) -> list[str]:
    """Return the request ids of an ABORT's data frames. Raise msgspec.DecodeError."""
    return _aborts.decode(head_frame(frames))


def _read_extras(extra_args: msgspec.Raw) -> tuple[float | None, str]:
    """Decode the extra arguments that are Tailrace's and return what `pace_in` does."""
    if len(memoryview(extra_args)) < 2:
        return None, ""
    try:
        extras = _extras.decode(extra_args) or {}
    except msgspec.ValidationError:
        # Names that are no strings: not from a user, over HTTP.
        return None, ""
    return pace_in({name: msgspec.msgpack.decode(raw) for name, raw in extras.items() if _is_ours(name)})


def pace_in(extra_args: Mapping[str, object] | None) -> tuple[float | None, str]:
    """Return the pace in milliseconds per token (None: not set), and what is wrong with Tailrace's
    arguments among these, for the user (empty: nothing)."""
    pace_ms: float | None = None
    for name, value in (extra_args or {}).items():
        if not _is_ours(name):
            continue
        if name != _PACE:
            return None, f"vllm_xargs.{_shown(name)}: Tailrace has no such argument, only {_PACE}."
        if value is None:
            continue
        # A bool is an int; NaN is in no range.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= _PACE_MAX_MS:
            problem = f"{_shown(repr(value))} is not a number from 0 to {_PACE_MAX_MS:.0f}."
            return None, f"vllm_xargs.{name}: {problem}"
        pace_ms = float(value)
    return pace_ms, ""


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def _is_ours(name: str) -> bool:
    return name.startswith(OURS)


def _array_length(head: bytes) -> int:
    """Return the length that a msgpack array's first bytes state; 0 for nil.

    Format: https://github.com/msgpack/msgpack/blob/master/spec.md#array-format-family
    """
    first = head[0]
    if first == 0xC0:
        return 0
    if first & 0xF0 == 0x90:
        return first & 0x0F
    if first == 0xDC:
        return int.from_bytes(head[1:3], "big")
    if first == 0xDD:
        return int.from_bytes(head[1:5], "big")
    raise msgspec.ValidationError(f"prompt_token_ids begins with byte {first:#x}: not an array")


class UtilityCall(msgspec.Struct, array_like=True, gc=False):
    """One call. `call_id` is an unsigned 64-bit number that the caller chooses."""

    client_index: int
    call_id: int
    method: str
    # A msgpack array.
    args: msgspec.Raw


_calls = msgspec.msgpack.Decoder(UtilityCall)
_encoder = msgspec.msgpack.Encoder()


def read_utility(frames: Frames) -> UtilityCall:
    """Decode a UTILITY's data frames. Raise msgspec.DecodeError."""
    return _calls.decode(head_frame(frames))


def utility_result(call_id: int, result: object) -> list[bytes]:
    """Encode the reply to a call that succeeded; `result` must consist of types that msgpack has."""
    # vLLM's UtilityResult is (type information or nil, value).
    return _answer([call_id, None, [None, result]])


def utility_failure(call_id: int, message: str) -> list[bytes]:
    """Encode the reply to a call that failed; the caller raises an exception with this message."""
    return _answer([call_id, message, None])


def _answer(output: list[object]) -> list[bytes]:
    return [_encoder.encode([0, [], None, time.monotonic(), output, None, None, None, None])]
