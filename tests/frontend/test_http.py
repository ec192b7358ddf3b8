"""The same tests for vLLM's real API servers, Python and Rust, over a scripted worker."""

from __future__ import annotations

import http.client
import json
import logging
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import openai
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families

from edge_svc.directory import Asked, directory
from frontend_svc.admission import NO_INSTANCE
from frontend_svc.api_server.http_protocol import RequestIds
from frontend_svc.settings import Front
from tailrace.records import ServiceRecord
from tailrace.service.message_stream import MIN_MESSAGE_BYTES
from tailrace.tiny import MODEL_PATH, REASONING_PARSER
from tailrace.v1 import scheduler_pb2, worker_pb2
from tailrace.wire.outputs import NIL
from tests.frontend.echo_worker import ANSWER, SCRIPT, THOUGHT
from tests.frontend.front_end_thread import MAX_STREAMS, FrontEndThread
from tests.frontend.test_placement import Scheduler, scheduler
from tests.harness.forked import api_server_python
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

pytestmark = pytest.mark.vllm

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def find_vllm_rs() -> Path | None:
    """Return the path of vllm-rs from the environment, PATH or the scripts folder; None if missing."""
    candidates = (os.environ.get("VLLM_RUST_FRONTEND_PATH"), shutil.which("vllm-rs"))
    beside = Path(sysconfig.get_path("scripts")) / "vllm-rs"
    return next((Path(c) for c in (*candidates, str(beside)) if c and Path(c).is_file()), None)


@pytest.fixture(scope="module", params=[Front.PYTHON, Front.RUST], ids=lambda front: front.value)
def front_end(request: pytest.FixtureRequest) -> Iterator[FrontEndThread]:
    """A front end shared by all tests of one API server."""
    vllm_rs = find_vllm_rs()
    if request.param is Front.RUST and vllm_rs is None:
        pytest.skip("no vllm-rs")
    with pytest.MonkeyPatch.context() as patch:
        # The development routes must not bypass the scheduler.
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        # It starts the API server with it.
        patch.setattr(sys, "executable", api_server_python() or sys.executable)
        thread = FrontEndThread(request.param, vllm_rs or Path())
        thread.start()
        yield thread
        thread.stop()


@pytest.fixture
def client(front_end: FrontEndThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front_end.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def post(front_end: FrontEndThread, path: str, body: object, **headers: str) -> httpx.Response:
    """Send a request that the openai package would reject."""
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"content-type": "application/json", **headers}
    return httpx.post(front_end.url + path, content=content, headers=headers, timeout=WAIT_S)


def get(front_end: FrontEndThread, path: str) -> httpx.Response:
    return httpx.get(front_end.url + path, timeout=WAIT_S)


def status_of(reply: httpx.Response) -> int:
    """Return the status of a refusal: a stream that began before it has it in its first event."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return reply.status_code
    event = json.loads(reply.text.removeprefix("data: ").partition("\n")[0])
    return int(event["error"]["code"])


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_health(front_end: FrontEndThread) -> None:
    assert get(front_end, "/health").status_code == 200


def test_chat_splits_reasoning_from_answer(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=HELLO)
    message = reply.choices[0].message
    assert message.content == ANSWER
    assert message.model_dump()["reasoning"] == THOUGHT
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(THOUGHT) + len(ANSWER) + 3


def test_chat_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    content, reasoning, usage = "", "", None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += choice.delta.model_dump().get("reasoning") or ""
    assert (reasoning, content) == (THOUGHT, ANSWER)
    assert usage is not None and usage.completion_tokens == len(THOUGHT) + len(ANSWER) + 3


@pytest.mark.parametrize("changed", [{}, {"max_tokens": 5}, {"max_tokens": 12}, {"include_reasoning": False}])
def test_usage_tells_how_many_tokens_are_reasoning(client: openai.OpenAI, changed: dict[str, object]) -> None:
    """As many as vLLM's own parser counts, streamed and not."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tokenizers import get_tokenizer

    limit = changed.get("max_tokens")
    tokens = SCRIPT[: limit if isinstance(limit, int) else None]
    parser = ReasoningParserManager.get_reasoning_parser(REASONING_PARSER)(get_tokenizer(str(MODEL_PATH)))
    expected = (len(tokens), parser.count_reasoning_tokens(tokens))

    def told(usage: CompletionUsage | None) -> tuple[int, int | None]:
        assert usage is not None and usage.completion_tokens_details is not None
        return usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens

    reply = client.chat.completions.create(model="tiny", messages=HELLO, extra_body=changed)
    assert told(reply.usage) == expected
    *_, last = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}, extra_body=changed
    )
    assert told(last.usage) == expected


def test_completions_with_n(front_end: FrontEndThread, client: openai.OpenAI) -> None:
    if front_end.front is Front.RUST:
        # vllm-rs 0.32 does not support it and reports this.
        with pytest.raises(openai.BadRequestError, match="n=1"):
            client.completions.create(model="tiny", prompt="x", max_tokens=6, n=2)
        return
    reply = client.completions.create(model="tiny", prompt="x", max_tokens=6, n=2)
    assert [choice.text for choice in reply.choices] == [f"<think>{THOUGHT[:5]}"] * 2
    assert {choice.finish_reason for choice in reply.choices} == {"length"}


PROMPT = {"model": "tiny", "prompt": "x", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
# Beyond what other tests have.
TAKEN: list[tuple[str, dict[str, object]]] = [
    (
        COMPLETIONS,
        {**PROMPT, "n": 1, "use_beam_search": False, "seed": 7, "echo": True},
    ),
    (COMPLETIONS, {**PROMPT, "prompt": [120, 121], "stop": ["["], "logit_bias": {"7": 1}, "min_p": 0.1}),
    (COMPLETIONS, {**PROMPT, "ignore_eos": True, "stop_token_ids": [3], "cache_salt": "a", "user": "["}),
    (CHATS, {**CHAT, "n": None, "top_k": 5, "repetition_penalty": 1.1, "response_format": {"type": "text"}}),
    (
        CHATS,
        {**CHAT, "chat_template_kwargs": {"a": 1}, "include_reasoning": False, "skip_special_tokens": False},
    ),
    (CHATS, {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}),
    ("/tokenize", {"model": "tiny", "messages": HELLO}),
    ("/detokenize", {"model": "tiny", "tokens": [120]}),
]
LACKED: list[tuple[str, dict[str, object]]] = [
    (COMPLETIONS, {**PROMPT, "n": 2}),
    (COMPLETIONS, {**PROMPT, "prompt": ["x", "y"]}),
    (COMPLETIONS, {**PROMPT, "prompt": [[120], [121]]}),
    (COMPLETIONS, {**PROMPT, "length_penalty": 1.0}),
    (COMPLETIONS, {**PROMPT, "spaces_between_special_tokens": False}),
    (CHATS, {**CHAT, "n": 2}),
    (CHATS, {**CHAT, "media_io_kwargs": {}}),
    (CHATS, {**CHAT, "mm_processor_kwargs": {}}),
    ("/v1/responses", {"model": "tiny", "input": "x", "max_output_tokens": 20}),
    ("/invocations", PROMPT),
]


def is_for_vllm_rs(path: str, body: object) -> bool:
    """Return whether an edge sends this to vllm-rs, where there is a Python app, too."""
    record = ServiceRecord(
        kind="frontend", service_id="a", incarnation="i", address="", http_address="a:1", model_name="tiny"
    )
    served = directory([record, msgspec.structs.replace(record, api_server="rust")], []).names["tiny"]
    return served.cluster(path, msgspec.json.decode(json.dumps(body), type=Asked)) == served.rust


@pytest.mark.parametrize(("path", "body"), TAKEN)
def test_what_an_edge_sends_to_vllm_rs_both_take(front_end: FrontEndThread, path: str, body: object) -> None:
    assert is_for_vllm_rs(path, body)
    reply = post(front_end, path, body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(("path", "body"), LACKED)
def test_what_an_edge_keeps_from_vllm_rs_only_the_python_app_takes(
    front_end: FrontEndThread, path: str, body: object
) -> None:
    assert not is_for_vllm_rs(path, body)
    reply = post(front_end, path, body)
    taken = front_end.front is Front.PYTHON
    assert reply.status_code == 200 if taken else reply.status_code in (400, 404), reply.text


def test_fields_that_vllm_rs_does_not_know_are_kept_from_it() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    if (executable := find_vllm_rs()) is None:
        pytest.skip("no vllm-rs")
    fields = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    names = executable.read_bytes()
    unknown = {field for field in fields if field.encode() not in names}
    assert unknown == {"return_token_offsets", "return_prompt_text", "return_mm_kwargs"}
    for field in unknown:
        assert not is_for_vllm_rs(COMPLETIONS, {**PROMPT, field: True})


def test_stop_string_is_applied_by_the_api_server_and_frees_the_request(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="x", max_tokens=100, stop=["me"])
    assert reply.choices[0].text == "<think>let "
    assert reply.choices[0].finish_reason == "stop"


def test_tokenize(front_end: FrontEndThread) -> None:
    assert post(front_end, "/tokenize", {"model": "tiny", "prompt": "xy"}).json()["tokens"] == [120, 121]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "tinier", "prompt": "x"}, 404),
        ({"model": "tiny", "prompt": "x" * 9000}, 400),
        ({"model": "tiny", "prompt": "x", "max_tokens": -5}, 400),
        ({"model": "tiny", "prompt": "x", "max_tokens": "many"}, 400),
        ("{broken", 400),
    ],
    ids=["unknown model", "too long", "negative max_tokens", "wrong type", "broken JSON"],
)
def test_invalid_input_gets_an_openai_error_and_reaches_no_worker(
    front_end: FrontEndThread, body: object, status: int
) -> None:
    requests_before = len(front_end.worker.requests)
    reply = post(front_end, "/v1/completions", body)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]
    assert len(front_end.worker.requests) == requests_before


# 60 KB that overflow the stack of whoever compiles them.
DEEP = {"type": "string", "pattern": "(" * 30_000 + "a" + ")" * 30_000}
DEEP_TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": DEEP}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHATS, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": DEEP}}}),
        (CHATS, {"response_format": DEEP_TAG}),
        (CHATS, {"structured_outputs": {"structural_tag": json.dumps(DEEP_TAG)}}),
        (CHATS, {"structured_outputs": {"json": DEEP}, "stream": True}),
        (COMPLETIONS, {"structured_outputs": {"json": DEEP}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": DEEP}}}),
    ],
    ids=["schema", "tag", "structured tag", "stream", "completion", "response"],
)
def test_grammar_that_would_end_the_api_server_is_refused(
    front_end: FrontEndThread, path: str, fields: dict[str, object]
) -> None:
    if front_end.front is Front.RUST:
        pytest.skip("vllm-rs checks no grammars")
    prompts: dict[str, dict[str, object]] = {
        CHATS: {"messages": HELLO},
        COMPLETIONS: {"prompt": "x"},
        "/v1/responses": {"input": "x"},
    }
    reply = post(front_end, path, {"model": "tiny", **prompts[path], **fields})
    assert status_of(reply) == 400, reply.text
    assert "takes more than 4 MiB of stack to compile" in reply.text
    assert get(front_end, "/health").status_code == 200


def test_invalid_grammar_is_refused_and_a_valid_one_is_not(front_end: FrontEndThread) -> None:
    if front_end.front is Front.RUST:
        pytest.skip("vllm-rs checks no grammars")
    for regex, status in (("a(", 400), ("a+", 200)):
        reply = post(front_end, CHATS, {**CHAT, "structured_outputs": {"regex": regex}})
        assert reply.status_code == status, reply.text
    tag = {"type": "structural_tag", "format": {"type": "nothing"}}
    reply = post(front_end, CHATS, {**CHAT, "response_format": tag})
    assert reply.status_code == 400 and "structural_tag" in reply.text


@pytest.mark.parametrize(
    ("extension", "value"),
    [("tailrace_pace_tpot_ms", "abc"), ("tailrace_pace_tpot_ms", -1), ("tailrace_pace", 50)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_tailrace_argument_is_refused_by_name(
    front_end: FrontEndThread, extension: str, value: object, stream: bool
) -> None:
    requests_before = len(front_end.worker.requests)
    body = {"model": "tiny", "prompt": "x", "stream": stream, "vllm_xargs": {extension: value}}
    reply = post(front_end, "/v1/completions", body)
    if front_end.front is Front.PYTHON:
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == 400
        assert f"vllm_xargs.{extension}: " in reply.json()["error"]["message"]
    else:
        # vllm-rs has errors without reasons only.
        assert reply.status_code == 500 or "error" in reply.text
    assert len(front_end.worker.requests) == requests_before


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/pause", "/resume"])
def test_routes_that_control_one_engine_are_refused(front_end: FrontEndThread, path: str) -> None:
    reply = post(front_end, path, {})
    if front_end.front is Front.PYTHON:
        assert reply.status_code == 501
        assert reply.json()["error"]["code"] == 501
        assert path in reply.json()["error"]["message"]
    else:
        # vllm-rs has no middleware: its client sees the refusal of the engine-core call.
        assert reply.status_code >= 400
    assert post(front_end, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1}).is_success


def test_request_too_large_for_any_worker_is_refused_with_413(front_end: FrontEndThread) -> None:
    requests_before = len(front_end.worker.requests)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    reply = post(front_end, "/v1/completions", {**body, "vllm_xargs": {"pad": "x" * (2 * MIN_MESSAGE_BYTES)}})
    if front_end.front is Front.PYTHON:
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == 413
        assert f"instances accept at most {MIN_MESSAGE_BYTES}." in reply.json()["error"]["message"]
    else:
        # vllm-rs does not pass on the reason of an error.
        assert reply.status_code == 500
    assert len(front_end.worker.requests) == requests_before
    assert post(front_end, "/v1/completions", body).status_code == 200


def test_requests_beyond_the_stream_limit_are_refused_with_429(front_end: FrontEndThread) -> None:
    if front_end.front is Front.RUST:
        pytest.skip("vllm-rs 0.32 answers 500 where frontend_svc gives a reason")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    # None of them ends by itself.
    open_ones = {**body, "stream": True, "min_tokens": 1}
    with ExitStack() as stack:
        lines = []
        for _ in range(MAX_STREAMS):
            url = f"{front_end.url}/v1/completions"
            reply = stack.enter_context(httpx.stream("POST", url, json=open_ones, timeout=WAIT_S))
            lines.append(reply.iter_lines())
            next(lines[-1])
        for count in (1, 2):
            refused = post(front_end, "/v1/completions", {**body, "n": count})
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == 429 and refused.headers["retry-after"] == "2"

    def status() -> int:
        return post(front_end, "/v1/completions", body).status_code

    wait_until(lambda: status() == 200, "the other requests to end")


def test_abandoned_stream_is_aborted_at_its_owner(front_end: FrontEndThread) -> None:
    body = {"model": "tiny", "prompt": "x", "stream": True, "min_tokens": 1, "max_tokens": 100}
    url = f"{front_end.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=WAIT_S) as reply:
        next(reply.iter_lines())
    handle, aborted = front_end.worker.submits[-1].handle, list[int]()
    # Those of tests before this one may come first.
    while handle not in aborted:
        aborted = list(front_end.call(front_end.worker.expect("abort")).abort.handles)
    assert aborted == [handle]


def vllm_samples(front_end: FrontEndThread, name: str, **labels: str) -> list[float]:
    """Return the samples of vLLM's metric with these labels."""
    families = text_string_to_metric_families(get(front_end, "/metrics").text)
    samples = [s for family in families for s in family.samples if s.name == f"vllm:{name}"]
    return [s.value for s in samples if labels.items() <= s.labels.items()]


def vllm_metric(front_end: FrontEndThread, name: str, **labels: str) -> float:
    """Return the sum of the samples of vLLM's metric with these labels."""
    found = vllm_samples(front_end, name, **labels)
    assert found, f"no vllm:{name} with {labels}"
    return sum(found)


def aborts(front_end: FrontEndThread) -> float:
    """Return how many clients left; vllm-rs shows no reason before a request ended with it."""
    return sum(vllm_samples(front_end, "request_success_total", finished_reason="abort"))


def test_vllm_metrics_show_the_fleet(front_end: FrontEndThread) -> None:
    """Requests that run and wait, the KV's use, aborts, and times that are not a clock's reading."""
    body = {"model": "tiny", "prompt": "x", "stream": True, "min_tokens": 1, "max_tokens": 100}
    aborted = aborts(front_end)

    def shown() -> tuple[float, float, float]:
        return (
            vllm_metric(front_end, "num_requests_running"),
            vllm_metric(front_end, "num_requests_waiting"),
            round(vllm_metric(front_end, "kv_cache_usage_perc"), 4),
        )

    async def tell(waiting: int, kv_usage: float) -> None:
        state = worker_pb2.EngineState(waiting=waiting, kv_usage=kv_usage)
        front_end.worker.send(worker_pb2.AttachDown(heartbeat=worker_pb2.Heartbeat(engine=state)))

    with ExitStack() as stack:
        # A response is closed with the iterator over its lines.
        lines = []
        for _ in range(3):
            reply = stack.enter_context(
                httpx.stream("POST", f"{front_end.url}/v1/completions", json=body, timeout=WAIT_S)
            )
            lines.append(reply.iter_lines())
            next(lines[-1])
        front_end.call(tell(1, 0.25))
        wait_until(lambda: shown() == (2.0, 1.0, 0.25), "the load of three requests")
    front_end.call(tell(0, float("nan")))
    wait_until(lambda: shown() == (0.0, 0.0, 0.0), "no load")
    wait_until(lambda: aborts(front_end) == aborted + 3, "three aborts")
    submitted = len(front_end.worker.submits)
    leaving = http.client.HTTPConnection(urlsplit(front_end.url).netloc, timeout=WAIT_S)
    content = json.dumps({**body, "stream": False})
    leaving.request("POST", "/v1/completions", content, {"content-type": "application/json"})
    wait_until(lambda: len(front_end.worker.submits) > submitted, "the request to run")
    leaving.close()
    wait_until(lambda: aborts(front_end) == aborted + 4, "an abort without a stream")
    if front_end.front is not Front.PYTHON:
        return
    names = ("request_prefill_time_seconds_sum", "request_inference_time_seconds_sum")
    before, began_s = [vllm_metric(front_end, name) for name in names], time.monotonic()
    assert post(front_end, "/v1/completions", {**body, "stream": False, "min_tokens": 0}).status_code == 200
    for name, earlier in zip(names, before, strict=True):
        # An uptime, unless it was counted from the request's arrival.
        assert 0.0 < vllm_metric(front_end, name) - earlier < time.monotonic() - began_s


def test_wrong_statistics_of_a_worker_end_no_api_server(front_end: FrontEndThread) -> None:
    """Times of no clock, and fewer tokens than none."""
    worker, body = front_end.worker, {"model": "tiny", "prompt": "x", "max_tokens": 3}
    encode = msgspec.msgpack.encode
    times = [float("nan"), float("inf"), -1e308, 1e308]
    worker.events = msgspec.Raw(encode([{"type": 1 + i % 3, "timestamp": t} for i, t in enumerate(times)]))
    counts = dict.fromkeys(["num_prompt_tokens", "num_computed_tokens", "num_local_cached_tokens"], -2)
    worker.prefill_stats = msgspec.Raw(encode(counts))
    try:
        assert post(front_end, "/v1/completions", body).status_code == 200
    finally:
        worker.events = worker.prefill_stats = NIL
    assert post(front_end, "/v1/completions", body).status_code == 200
    if front_end.front is Front.PYTHON:
        assert 0.0 <= vllm_metric(front_end, "request_queue_time_seconds_sum") < 60.0


def test_trace_context_reaches_the_worker(front_end: FrontEndThread) -> None:
    post(
        front_end,
        "/v1/completions",
        {"model": "tiny", "prompt": "x", "max_tokens": 1},
        traceparent=TRACEPARENT,
    )
    submit = front_end.worker.submits[-1]
    # vllm-rs does not pass the header on; such a request's trace begins at frontend_svc.
    assert submit.traceparent == (TRACEPARENT if front_end.front is Front.PYTHON else "")


def test_request_that_would_wait_too_long_is_refused_with_429(front_end: FrontEndThread) -> None:
    refusal_reply = scheduler_pb2.PlaceReply(refusal="its first token would arrive in 9.0 s", final=True)

    async def add_refusing_scheduler() -> AsyncExitStack:
        stack = AsyncExitStack()
        await stack.enter_async_context(scheduler(front_end.members, "s", Scheduler(lambda _: refusal_reply)))
        return stack

    async def remove_scheduler(stack: AsyncExitStack) -> None:
        await stack.aclose()
        front_end.members.services.clear()
        front_end.members.leaders.clear()

    requests_before = len(front_end.worker.requests)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    chat = {"model": "tiny", "messages": HELLO, "max_tokens": 1}
    stack = front_end.call(add_refusing_scheduler())
    try:
        replies = [
            post(front_end, "/v1/completions", body),
            post(front_end, "/v1/completions", {**body, "stream": True}),
            post(front_end, "/v1/chat/completions", chat),
            post(front_end, "/v1/chat/completions", {**chat, "stream": True}),
        ]
    finally:
        front_end.call(remove_scheduler(stack))
    assert len(front_end.worker.requests) == requests_before
    if front_end.front is Front.PYTHON:
        assert [status_of(reply) for reply in replies] == [429] * 4
        refused = [reply for reply in replies if reply.status_code == 429]
        assert {reply.json()["error"]["code"] for reply in refused} == {429}
        assert {reply.headers["retry-after"] for reply in refused} == {"2"}
        assert replies[0] in refused and replies[2] in refused
    else:
        # vllm-rs does not pass on the reason of an error.
        assert [replies[0].status_code, replies[2].status_code] == [500, 500]
    assert post(front_end, "/v1/completions", body).status_code == 200


def test_refused_when_no_instance_can_take_it(front_end: FrontEndThread) -> None:
    """Runs last, as the fleet drains. The Python server returns 503 before a stream; the Rust one cannot."""

    async def drain(draining: frozenset[str]) -> None:
        front_end.members.draining = draining
        front_end.members.changed()

    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    front_end.call(drain(frozenset({"w0"})))
    # The first request waits for an instance until its deadline; from then on admission is closed.
    first = post(front_end, "/v1/completions", body)
    second = post(front_end, "/v1/completions", {**body, "stream": True})
    unready, health = get(front_end, "/ready"), get(front_end, "/health")
    assert front_end.readiness.unready == NO_INSTANCE
    front_end.call(drain(frozenset()))
    assert front_end.readiness.unready is None
    assert health.status_code == 200
    assert first.json()["error"]["message"]
    if front_end.front is Front.PYTHON:
        assert [first.status_code, second.status_code] == [503, 503]
        assert first.headers["retry-after"] == second.headers["retry-after"] == "2"
        assert second.json()["error"]["code"] == 503
        assert unready.status_code == 503 and unready.headers["retry-after"] == "2"
        assert unready.json()["error"]["message"] == NO_INSTANCE.message
        assert get(front_end, "/ready").status_code == 200
    else:
        assert first.status_code == 500
    assert post(front_end, "/v1/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "logged"), [("/health", 200, False), ("/health", 503, True), ("/v1/models", 200, True)]
)
def test_probes_that_succeed_are_not_logged(path: str, status: int, logged: bool) -> None:
    arguments = ("10.0.0.1:5", "GET", path, "1.1", status)
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "", arguments, None)
    assert RequestIds().filter(record) == logged
