"""Our mirror of the protocol against the installed vLLM: positions, defaults and round trips."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from tailrace.wire import requests
from tailrace.wire.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    encode_outputs,
    error_outputs,
    filter_outputs,
    read_outputs,
    rename_outputs,
    shrink_outputs,
)
from tailrace.wire.readable import check_outputs
from tailrace.wire.ready import ReadyResponse, read_ready, write_ready
from tailrace.wire.requests import (
    EngineCoreRequest,
    OfTenant,
    RequestHead,
    RequestType,
    for_engines,
    read_abort,
    read_full_request,
    read_request,
    read_utility,
    utility_failure,
    utility_result,
)

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def vllm_engine() -> Any:
    return pytest.importorskip("vllm.v1.engine")


@pytest.fixture(scope="module")
def serial() -> Any:
    return pytest.importorskip("vllm.v1.serial_utils")


def _encode(serial: Any, message: object) -> list[bytes]:
    return [bytes(frame) for frame in serial.MsgpackEncoder().encode(message)]


def _request(vllm_engine: Any, prompt: list[int] | None, **sampling: Any) -> Any:
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(**sampling)
    return vllm_engine.EngineCoreRequest(
        "chat-1",
        prompt,
        None,
        params,
        None,
        12.5,
        None,
        None,
        None,
        client_index=3,
        priority=-1,
        trace_headers={"traceparent": "00-ab-cd-01"},
        external_req_id="mine",
        reasoning_ended=True,
        session_id="talk",
    )


@pytest.mark.parametrize("mirror", [EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest])
def test_fields_are_in_vllms_order(vllm_engine: Any, mirror: type[msgspec.Struct]) -> None:
    ours, theirs = mirror.__struct_fields__, getattr(vllm_engine, mirror.__name__).__struct_fields__
    # Earlier versions lack some of the last fields.
    both = min(len(ours), len(theirs))
    assert ours[:both] == theirs[:both]


def test_outputs_are_mirrored_to_the_last_field(vllm_engine: Any) -> None:
    for mirror in (EngineCoreOutput, EngineCoreOutputs):
        theirs = getattr(vllm_engine, mirror.__name__).__struct_fields__
        assert mirror.__struct_fields__[: len(theirs)] == theirs


def test_sampling_params_exist_with_these_defaults(vllm_engine: Any) -> None:
    from vllm.sampling_params import SamplingParams

    theirs = {field.encode_name: field for field in msgspec.structs.fields(SamplingParams)}
    for field in msgspec.structs.fields(requests.SamplingParams):
        assert field.encode_name in theirs
        if field.default is not msgspec.NODEFAULT and not isinstance(field.default, msgspec.Raw):
            assert field.default == theirs[field.encode_name].default, field.name


def test_enumerations(vllm_engine: Any) -> None:
    assert {r.name: r.value for r in FinishReason} == {r.name: r.value for r in vllm_engine.FinishReason}
    theirs = {t.name: t.value for t in vllm_engine.EngineCoreRequestType}
    for kind in RequestType:
        assert theirs[kind.name] == kind.value


@pytest.mark.parametrize("length", [0, 1, 15, 16, 70_000])
def test_request_head(vllm_engine: Any, serial: Any, length: int) -> None:
    frames = _encode(serial, _request(vllm_engine, [7] * length, max_tokens=99, min_tokens=3, seed=5))
    head = read_request(frames)
    assert head == RequestHead(
        request_id="chat-1",
        prompt_tokens=length,
        max_tokens=99,
        min_tokens=3,
        generates=True,
        adapter=False,
        client_index=3,
        priority=-1,
        arrival_time=12.5,
        trace_headers={"traceparent": "00-ab-cd-01"},
        external_req_id="mine",
        reasoning_ended=True,
        session_id="talk",
        pace_tpot_ms=None,
    )


def test_request_for_engines_differs_in_ids_alone(vllm_engine: Any, serial: Any) -> None:
    request = _request(vllm_engine, [7] * 20_000, max_tokens=99, logit_bias={3: 1.0})
    frames = for_engines(_encode(serial, request), "ours")
    decoded = serial.MsgpackDecoder(vllm_engine.EngineCoreRequest).decode(frames)
    request.request_id, request.external_req_id, request.trace_headers = "ours", None, None
    assert frames == _encode(serial, request)
    assert decoded.request_id == "ours" and decoded.session_id == "talk"


def test_the_tenant_decides_salt_and_priority(vllm_engine: Any, serial: Any) -> None:
    request = _request(vllm_engine, [7] * 20_000, max_tokens=99)
    frames = for_engines(_encode(serial, request), "ours", OfTenant("/tenant/1/a/", 3))
    decoded = serial.MsgpackDecoder(vllm_engine.EngineCoreRequest).decode(frames)
    assert (decoded.cache_salt, decoded.priority) == ("/tenant/1/a/", 3)
    request.request_id, request.external_req_id, request.trace_headers = "ours", None, None
    request.cache_salt, request.priority = "/tenant/1/a/", 3
    assert frames == _encode(serial, request)


def test_outputs_are_renamed(vllm_engine: Any, serial: Any) -> None:
    def message(first: str, second: str) -> list[bytes]:
        outputs = [
            vllm_engine.EngineCoreOutput(first, [1], finish_reason=vllm_engine.FinishReason.STOP),
            vllm_engine.EngineCoreOutput(second, [2], trace_headers={"traceparent": "t"}),
        ]
        return _encode(
            serial, vllm_engine.EngineCoreOutputs(outputs=outputs, timestamp=1.0, finished_requests={first})
        )

    names = {"a": "x" * 300, "b": "y", "c": "z"}
    assert rename_outputs(message("a", "b"), names) == message("x" * 300, "y")
    assert names == {"b": "y", "c": "z"}
    assert rename_outputs(message("a", "d"), names) == message("a", "d")


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        ({"tailrace_pace_tpot_ms": 50}, 50.0),
        ({"other": [1, {"deep": 2}], "tailrace_pace_tpot_ms": 0.0}, 0.0),
        ({"other": 1}, None),
        ({"tailrace_pace_tpot_ms": None}, None),
    ],
)
def test_pace_among_the_extra_arguments(
    vllm_engine: Any, serial: Any, extra: dict[str, Any], wanted: float | None
) -> None:
    head = read_request(_encode(serial, _request(vllm_engine, [1], extra_args=extra)))
    assert (head.pace_tpot_ms, head.wrong_extra) == (wanted, "")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("fast", "'fast'"),
        ("50", "'50'"),
        (-1.0, "-1.0"),
        (True, "True"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (60_001, "60001"),
        (2**63, str(2**63)),
        ([50], "[50]"),
        ("x" * 1_000, "'" + "x" * 39 + "..."),
    ],
)
def test_invalid_pace_is_refused_by_name(vllm_engine: Any, serial: Any, value: object, shown: str) -> None:
    extra = {"tailrace_pace_tpot_ms": value}
    head = read_request(_encode(serial, _request(vllm_engine, [1], extra_args=extra)))
    assert head.pace_tpot_ms is None
    assert head.wrong_extra == f"vllm_xargs.tailrace_pace_tpot_ms: {shown} is not a number from 0 to 60000."


def test_unknown_tailrace_argument_is_refused_by_name(vllm_engine: Any, serial: Any) -> None:
    extra = {"tailrace_pace_tpot": 50, "other": 1}
    head = read_request(_encode(serial, _request(vllm_engine, [1], extra_args=extra)))
    assert "vllm_xargs.tailrace_pace_tpot: " in head.wrong_extra


def test_request_with_defaults_and_without_prompt_ids(vllm_engine: Any, serial: Any) -> None:
    head = read_request(_encode(serial, _request(vllm_engine, None)))
    assert (head.prompt_tokens, head.max_tokens, head.min_tokens) == (0, 16, 0)
    head = read_request(_encode(serial, _request(vllm_engine, None, max_tokens=None)))
    assert head.max_tokens is None


def test_full_request(vllm_engine: Any, serial: Any) -> None:
    original = _request(vllm_engine, [1, 2, 3], max_tokens=8, seed=4, stop_token_ids=[9], ignore_eos=True)
    original.sampling_params._eos_token_id = 258
    request = read_full_request(_encode(serial, original))
    assert request.prompt_token_ids == [1, 2, 3]
    sampling = request.sampling_params
    assert sampling is not None
    assert (sampling.seed, sampling.stop_token_ids, sampling.ignore_eos) == (4, [9], True)
    assert sampling.eos_token_id == 258


def test_not_a_request() -> None:
    with pytest.raises(msgspec.DecodeError):
        read_request([msgspec.msgpack.encode(["only an id"])])


def _two_outputs_with_logprobs(vllm_engine: Any) -> Any:
    from vllm.v1.outputs import LogprobsLists

    def logprobs(offset: int) -> LogprobsLists:
        # 20 x 10 ids and floats go to auxiliary buffers, the ranks are small enough to be inline.
        return LogprobsLists(
            np.arange(200).reshape(20, 10) + offset,
            np.full((20, 10), -0.5 - offset, np.float32),
            np.arange(1, 21) + offset,
        )

    return vllm_engine.EngineCoreOutputs(
        outputs=[
            vllm_engine.EngineCoreOutput("a", [1, 2], new_logprobs=logprobs(0)),
            vllm_engine.EngineCoreOutput(
                "b",
                [3],
                new_logprobs=logprobs(1000),
                finish_reason=vllm_engine.FinishReason.STOP,
                stop_reason="end",
                kv_transfer_params={"x": [1]},
                num_nans_in_logits=2,
            ),
        ],
        finished_requests={"b"},
        **_last(vllm_engine),
    )


def _last(vllm_engine: Any) -> dict[str, str]:
    """Return the last field of vLLM's message, which exists since 0.32."""
    exists = "weight_version" in vllm_engine.EngineCoreOutputs.__struct_fields__
    return {"weight_version": "v9"} if exists else {}


@pytest.mark.parametrize("keep", [(True, True), (True, False), (False, True), (False, False)])
def test_filter_keeps_the_rest_untouched(vllm_engine: Any, serial: Any, keep: tuple[bool, bool]) -> None:
    original = _two_outputs_with_logprobs(vllm_engine)
    frames = _encode(serial, original)
    assert len(frames) > 4

    decoded = serial.MsgpackDecoder(vllm_engine.EngineCoreOutputs).decode(filter_outputs(frames, keep))

    expected = [output for output, kept in zip(original.outputs, keep, strict=True) if kept]
    assert [output.request_id for output in decoded.outputs] == [output.request_id for output in expected]
    for ours, theirs in zip(decoded.outputs, expected, strict=True):
        for field in theirs.__struct_fields__:
            if field == "new_logprobs":
                for left, right in zip(ours.new_logprobs[:3], theirs.new_logprobs[:3], strict=True):
                    np.testing.assert_array_equal(left, right)
            else:
                assert getattr(ours, field) == getattr(theirs, field), field
    assert decoded.finished_requests == ({"b"} if keep[1] else None)
    assert decoded.timestamp == original.timestamp
    for field, value in _last(vllm_engine).items():
        assert getattr(decoded, field) == value


def test_filter_requires_one_verdict_per_output(vllm_engine: Any, serial: Any) -> None:
    with pytest.raises(ValueError, match="1 verdicts for 2"):
        filter_outputs(_encode(serial, _two_outputs_with_logprobs(vllm_engine)), [True])


def test_what_vllm_encodes_is_readable(vllm_engine: Any, serial: Any) -> None:
    import torch
    from vllm.v1.outputs import LogprobsTensors

    check_outputs(_encode(serial, _two_outputs_with_logprobs(vllm_engine)))
    ids = torch.arange(8_000, dtype=torch.int32).reshape(400, 20)
    prompt = LogprobsTensors(ids, -ids.float(), torch.ones(400, dtype=torch.int64))
    kinds = vllm_engine.EngineCoreEventType
    embedding, image = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, 200)
    outputs = [
        vllm_engine.EngineCoreOutput("a", [1], new_prompt_logprobs_tensors=prompt),
        vllm_engine.EngineCoreOutput("b", [1], events=[vllm_engine.EngineCoreEvent.new_event(kinds.QUEUED)]),
        *(vllm_engine.EngineCoreOutput("c", [], pooling_output=each) for each in (embedding, image)),
        vllm_engine.EngineCoreOutput("d", [1], routed_experts=np.ones((1, 2, 3), np.int16)),
    ]
    check_outputs(_encode(serial, vllm_engine.EngineCoreOutputs(outputs=outputs, timestamp=1.0)))


def test_outputs_survive_a_round_trip(vllm_engine: Any, serial: Any) -> None:
    frames = _encode(serial, _two_outputs_with_logprobs(vllm_engine))
    ours = read_outputs(frames)
    assert [output.new_token_ids for output in ours.outputs] == [[1, 2], [3]]
    again = msgspec.msgpack.encode(ours)
    # Before 0.32 vLLM writes fewer fields.
    assert again == frames[0] if _last(vllm_engine) else read_outputs([again, *frames[1:]]) == ours


def test_encoded_outputs_equal_vllms(vllm_engine: Any, serial: Any) -> None:
    frames = encode_outputs([EngineCoreOutput("a", [5], finish_reason=1)], ["a"])
    decoded = serial.MsgpackDecoder(vllm_engine.EngineCoreOutputs).decode(frames)
    theirs = vllm_engine.EngineCoreOutput("a", [5], finish_reason=vllm_engine.FinishReason.LENGTH)
    assert decoded.outputs == [theirs]
    assert decoded.finished_requests == {"a"}
    assert decoded.timestamp > 0
    # As many fields as vLLM's own encoder writes, for readers that count them; before 0.32 it writes fewer.
    written = msgspec.msgpack.decode(_encode(serial, theirs)[0])
    ours = msgspec.msgpack.decode(frames[0])[1][0]
    assert ours[: len(written)] == written and not any(ours[len(written) :])


def test_endings(vllm_engine: Any, serial: Any) -> None:
    decoder = serial.MsgpackDecoder(vllm_engine.EngineCoreOutputs)
    outputs = decoder.decode(error_outputs(["a", "b"])).outputs
    assert [(o.request_id, o.new_token_ids, str(o.finish_reason)) for o in outputs] == [
        ("a", [], "error"),
        ("b", [], "error"),
    ]


def test_utility_calls(vllm_engine: Any, serial: Any) -> None:
    call_id = 2**64 - 1
    call = read_utility(_encode(serial, (0, call_id, "sleep", (1, "abort"))))
    assert (call.client_index, call.call_id, call.method) == (0, call_id, "sleep")
    assert msgspec.msgpack.decode(call.args) == [1, "abort"]

    decoder = serial.MsgpackDecoder(vllm_engine.EngineCoreOutputs)
    answer = decoder.decode(utility_result(call_id, ["generate"])).utility_output
    assert (answer.call_id, answer.failure_message, answer.result.result) == (call_id, None, ["generate"])
    failure = decoder.decode(utility_failure(7, "no such method")).utility_output
    assert (failure.call_id, failure.failure_message, failure.result) == (7, "no such method", None)


def test_abort(serial: Any) -> None:
    assert read_abort(_encode(serial, ["a", "b"])) == ["a", "b"]


def test_ready_response(vllm_engine: Any) -> None:
    theirs = {field.name for field in dataclasses.fields(vllm_engine.EngineCoreReadyResponse)}
    assert set(ReadyResponse.__struct_fields__) >= theirs
    response = vllm_engine.EngineCoreReadyResponse(
        1024,
        10,
        16,
        None,
        "float32",
        "0.32.0",
        1,
        1,
        1,
        1,
        1,
        0,
        8,
        2048,
        "id",
        False,
        0,
        kv_cache_size_tokens=160,
    )
    payload = msgspec.msgpack.encode(response)
    ours = read_ready(payload)
    assert (ours.max_model_len, ours.kv_cache_size_tokens) == (1024, 160)
    again = msgspec.msgpack.decode(write_ready(ours), type=vllm_engine.EngineCoreReadyResponse)
    assert again == response


def test_too_large_message_loses_only_its_largest_output(vllm_engine: Any, serial: Any) -> None:
    """The buffers of its prompt log-probabilities are dropped with it; those of other outputs stay."""
    import torch
    from vllm.v1.outputs import LogprobsTensors

    def output(name: str, tokens: int) -> Any:
        tensors = LogprobsTensors(
            torch.arange(tokens * 300, dtype=torch.int32).reshape(tokens, 300),
            torch.full((tokens, 300), -1.5),
            torch.arange(tokens, dtype=torch.int32),
        )
        return vllm_engine.EngineCoreOutput(name, [1], new_prompt_logprobs_tensors=tensors)

    message = vllm_engine.EngineCoreOutputs(outputs=[output("a", 5), output("large", 1000), output("b", 7)])
    frames = _encode(serial, message)
    left, dropped = shrink_outputs(frames, 100_000)
    assert list(dropped) == [1] and dropped[1] > 1_000_000 and sum(map(len, left)) < 30_000
    decoded = serial.MsgpackDecoder(vllm_engine.EngineCoreOutputs).decode(left)
    assert [each.request_id for each in decoded.outputs] == ["a", "b"]
    for each, tokens in zip(decoded.outputs, (5, 7), strict=True):
        wanted = output("", tokens).new_prompt_logprobs_tensors
        for got, want in zip(each.new_prompt_logprobs_tensors[:3], wanted[:3], strict=True):
            assert torch.equal(torch.as_tensor(got), want)
