"""Engine core to API server: the outputs of one step."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Sequence

import msgspec

from tailrace.wire.requests import Frames, head_frame

NIL = msgspec.Raw(b"\xc0")
"""msgpack's nil."""

_FINISHED_REQUESTS = 5
"""Position of finished_requests in EngineCoreOutputs."""
_SCHEDULER_STATS = 2
# By position in EngineCoreOutput: events, prefill_stats, num_nans_in_logits; with what says nothing.
_STATISTICS = {7: NIL, 11: NIL, 13: msgspec.Raw(b"\x00")}


class FinishReason(enum.IntEnum):
    """Why a request finished. vLLM's API server turns ERROR into a 500 for the user."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request's outputs in one step. Fields that are not read here stay raw msgpack."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: msgspec.Raw = NIL
    new_prompt_logprobs_tensors: msgspec.Raw = NIL
    pooling_output: msgspec.Raw = NIL
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: msgspec.Raw = NIL
    kv_transfer_params: msgspec.Raw = NIL
    ec_transfer_params: msgspec.Raw = NIL
    trace_headers: dict[str, str] | None = None
    prefill_stats: msgspec.Raw = NIL
    routed_experts: msgspec.Raw = NIL
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: msgspec.Raw = NIL
    spec_decode_metrics: msgspec.Raw = NIL
    prompt_token_id_logprobs: msgspec.Raw = NIL


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One step's outputs for one front end. `timestamp`: seconds of the engine's monotonic clock."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: msgspec.Raw = NIL
    timestamp: float = 0.0
    utility_output: msgspec.Raw = NIL
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None


class _OutputName(msgspec.Struct, array_like=True, gc=False):
    """The leading field of one output, whatever follows it."""

    request_id: str


class OutputEnd(msgspec.Struct, array_like=True, gc=False):
    """The fields of one output that tell whether it is a request's last."""

    request_id: str
    new_token_ids: msgspec.Raw = NIL
    new_logprobs: msgspec.Raw = NIL
    new_prompt_logprobs_tensors: msgspec.Raw = NIL
    pooling_output: msgspec.Raw = NIL
    finish_reason: int | None = None


_encoder = msgspec.msgpack.Encoder()
_outputs = msgspec.msgpack.Decoder(EngineCoreOutputs)
_raw_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
_end = msgspec.msgpack.Decoder(OutputEnd)
_name = msgspec.msgpack.Decoder(_OutputName)
_names = msgspec.msgpack.Decoder(list[str] | None)


def read_outputs(frames: Frames) -> EngineCoreOutputs:
    """Decode a message. Raise msgspec.DecodeError if it is not a message of outputs."""
    return _outputs.decode(head_frame(frames))


def without_statistics(frames: Frames) -> list[bytes]:
    """Return a message of outputs without the engine's statistics, which no answer depends on.

    Everything else stays byte for byte. Raise msgspec.DecodeError if this is not a message of outputs.
    """
    fields: list[msgspec.Raw | list[msgspec.Raw] | list[list[msgspec.Raw]]] = [
        *_raw_list.decode(head_frame(frames))
    ]
    outputs = [_raw_list.decode(output) for output in _raw_list.decode(fields[1])]  # type: ignore[arg-type]
    for output in outputs:
        for position, nothing in _STATISTICS.items():
            if len(output) > position:
                output[position] = nothing
    fields[1] = outputs
    if len(fields) > _SCHEDULER_STATS:
        fields[_SCHEDULER_STATS] = NIL
    return [_encoder.encode(fields), *frames[1:]]


def encode_outputs(outputs: Sequence[EngineCoreOutput], finished: Sequence[str] = ()) -> list[bytes]:
    """Encode a message of these outputs, with the current time, as vLLM's engine core 0 would send it."""
    message = EngineCoreOutputs(
        0, list(outputs), timestamp=time.monotonic(), finished_requests=list(finished) or None
    )
    return [_encoder.encode(message)]


def filter_outputs(frames: Frames, keep: Sequence[bool]) -> list[bytes]:
    """Drop the outputs whose entry of `keep` is False; everything else stays byte for byte.

    All auxiliary buffers are kept, so that the indices of those still referred to stay valid. Raise
    ValueError unless `keep` has one entry per output, msgspec.DecodeError if this is not a message of
    outputs.
    """
    fields = _raw_list.decode(head_frame(frames))
    outputs = _raw_list.decode(fields[1])
    if len(outputs) != len(keep):
        raise ValueError(f"{len(keep)} verdicts for {len(outputs)} outputs")
    dropped = {
        _name.decode(output).request_id for output, kept in zip(outputs, keep, strict=True) if not kept
    }
    rebuild_handler: list[msgspec.Raw | list[msgspec.Raw] | list[str] | None] = [*fields]
    rebuild_handler[1] = [output for output, kept in zip(outputs, keep, strict=True) if kept]
    if len(fields) > _FINISHED_REQUESTS:
        finished = _names.decode(fields[_FINISHED_REQUESTS])
        if finished is not None:
            rebuild_handler[_FINISHED_REQUESTS] = [name for name in finished if name not in dropped] or None
    return [_encoder.encode(rebuild_handler), *frames[1:]]


def split_outputs(frames: Frames, positions: Sequence[int]) -> tuple[list[bytes], list[list[bytes]]]:
    """Move the outputs at these positions into messages of their own; return the remaining message, and those
    in the given order.

    Every output stays byte for byte, and every message keeps all auxiliary buffers. Raise IndexError if there
    is no such position, msgspec.DecodeError if this is not a message of outputs.
    """
    fields = _raw_list.decode(head_frame(frames))
    outputs = _raw_list.decode(fields[1])
    finished = _names.decode(fields[_FINISHED_REQUESTS]) if len(fields) > _FINISHED_REQUESTS else None
    ended = set(finished or ())
    aux = list(frames[1:])
    messages: list[list[bytes]] = []
    for position in positions:
        output = outputs[position]
        name = _name.decode(output).request_id
        names = [name] if name in ended else None
        ended.discard(name)
        messages.append([_encoder.encode([fields[0], [output], NIL, *fields[3:4], NIL, names]), *aux])
    left_out = set(positions)
    remaining_fields: list[msgspec.Raw | list[msgspec.Raw] | list[str] | None] = [*fields]
    remaining_fields[1] = [output for position, output in enumerate(outputs) if position not in left_out]
    if finished is not None:
        remaining_fields[_FINISHED_REQUESTS] = [name for name in finished if name in ended] or None
    return [_encoder.encode(remaining_fields), *aux], messages


def stats_outputs(running: int, waiting: int, kv_usage: float) -> list[bytes]:
    """Encode a message without outputs whose SchedulerStats have these values; `kv_usage` is from 0 to 1."""
    # vllm-rs reads it only if it is complete.
    stats = {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_skipped_waiting_reqs": 0,
        "num_kv_fetch_reqs_by_stage": {},
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": kv_usage,
        "iteration_details": None,
        "prefix_cache_stats": {
            "reset": False,
            "requests": 0,
            "queries": 0,
            "hits": 0,
            "preempted_requests": 0,
            "preempted_queries": 0,
            "preempted_hits": 0,
            "hits_by_source": {},
        },
        "connector_prefix_cache_stats": None,
        "kv_cache_eviction_events": [],
        "spec_decoding_stats": None,
        "kv_connector_stats": None,
        "ec_connector_stats": None,
        "waiting_lora_adapters": {},
        "running_lora_adapters": {},
        "cudagraph_stats": None,
        "perf_stats": None,
    }
    message = EngineCoreOutputs(
        scheduler_stats=msgspec.Raw(_encoder.encode(stats)), timestamp=time.monotonic()
    )
    return [_encoder.encode(message)]


def error_outputs(request_ids: Iterable[str]) -> list[bytes]:
    """Encode a message that ends these requests with an internal error (500 to the user)."""
    names = list(request_ids)
    ends = [EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR) for name in names]
    return encode_outputs(ends, names)


def shrink_outputs(frames: Frames, limit_bytes: int) -> tuple[list[bytes], dict[int, int]]:
    """Remove the largest outputs until the message has at most `limit_bytes`.

    Return the remaining message and the positions of the removed outputs, in ascending order, with their
    bytes. The auxiliary
    buffers of removed outputs become empty, so that the indices of the others stay valid. Everything else
    stays byte for byte. Raise msgspec.DecodeError if this is not a message of outputs.
    """
    excess = sum(map(len, frames)) - limit_bytes
    if excess <= 0:
        return list(frames), {}
    outputs = _raw_list.decode(_raw_list.decode(head_frame(frames))[1])
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
        {position: sizes[position] for position, kept in enumerate(keep) if not kept},
    )


def detach_buffers(frames: Frames) -> list[bytes]:
    """Empty the auxiliary buffers that no output of this message refers to. Raise msgspec.DecodeError."""
    if len(frames) == 1:
        return list(frames)
    outputs = _raw_list.decode(_raw_list.decode(head_frame(frames))[1])
    used = set[int]().union(*(_buffers(msgspec.msgpack.decode(output), len(frames)) for output in outputs))
    return [frame if index == 0 or index in used else b"" for index, frame in enumerate(frames)]


def rename_output(frames: Frames, request_id: str) -> list[bytes]:
    """Return a message of one output as a message of another request; everything else stays byte for byte.

    Raise msgspec.DecodeError if this is not such a message, ValueError unless it has one output.
    """
    fields = _raw_list.decode(head_frame(frames))
    (output,) = _raw_list.decode(fields[1])
    values: list[msgspec.Raw | str] = [*_raw_list.decode(output)]
    values[0] = request_id
    rebuild_handler: list[msgspec.Raw | list[list[msgspec.Raw | str]] | list[str]] = [*fields]
    rebuild_handler[1] = [values]
    if len(fields) > _FINISHED_REQUESTS and _names.decode(fields[_FINISHED_REQUESTS]) is not None:
        rebuild_handler[_FINISHED_REQUESTS] = [request_id]
    return [_encoder.encode(rebuild_handler), *frames[1:]]


def rename_outputs(frames: Frames, names: dict[str, str]) -> list[bytes]:
    """Return a message of outputs with other names for the requests in `names`; drop a name from it with the
    request's last output.

    Everything else stays byte for byte. Raise msgspec.DecodeError if this is not a message of outputs.
    """
    fields: list[msgspec.Raw | list[msgspec.Raw] | list[str]] = [*_raw_list.decode(head_frame(frames))]
    outputs = _raw_list.decode(fields[1])  # type: ignore[arg-type]
    ended: dict[str, str] = {}
    for position, output in enumerate(outputs):
        head = _end.decode(output)
        name = names.get(head.request_id)
        if name is None:
            continue
        values: list[msgspec.Raw | str] = [*_raw_list.decode(output)]
        values[0] = name
        outputs[position] = msgspec.Raw(_encoder.encode(values))
        if head.finish_reason is not None:
            ended[head.request_id] = names.pop(head.request_id)
    fields[1] = outputs
    if len(fields) > _FINISHED_REQUESTS:
        finished = _names.decode(fields[_FINISHED_REQUESTS])  # type: ignore[arg-type]
        if finished is not None:
            known = {**names, **ended}
            fields[_FINISHED_REQUESTS] = [known.get(name, name) for name in finished]
    return [_encoder.encode(fields), *frames[1:]]


def _buffers(value: object, frames: int) -> set[int]:
    """Return the indices of the auxiliary buffers that a decoded output refers to: arrays are (dtype,
    shape, index)."""
    if isinstance(value, dict):
        return set[int]().union(*(_buffers(element, frames) for element in value.values()))
    if not isinstance(value, list | tuple):
        return set()
    if _is_array(value):
        index = value[2]
        return {index} if isinstance(index, int) and 0 < index < frames else set()
    return set[int]().union(
        *(_buffers(element, frames) for element in value if isinstance(element, list | dict))
    )


def _is_array(value: Sequence[object]) -> bool:
    return len(value) == 3 and isinstance(value[0], str) and isinstance(value[1], list)
