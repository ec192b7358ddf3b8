"""What a client sends wrong gets 400 with the reason at an edge before both API servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import RUST_FRONT
from tests.harness.fleet import MODEL, Fleet
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.vllm,
    pytest.mark.skipif(not RUST_FRONT.exists(), reason="no vllm-rs"),
]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT: dict[str, Any] = {"prompt": "x"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
WRONG_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NO_PROMPT_LOGPROBS = "the simulated engine has no prompt log probabilities"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an edge before a front end with each API server."""
    fleet = Fleet(tmp_path_factory.mktemp("both"), "simulated")
    try:
        fleet.start_control()
        fleet.start_worker("w0", wait=False)
        fleet.start_frontend("rust", "rust", wait=False)
        fleet.start_frontend("python", "python")
        fleet.wait_instances(["w0"])
        fleet.start_edge()
        edge = fleet.urls["edge"]
        wait_until(lambda: ask(edge, COMPLETIONS, {**PROMPT, "max_tokens": 1}).is_success, "vllm-rs")
        wait_until(lambda: ask(edge, COMPLETIONS, {**PROMPT, "max_tokens": 1, "n": 2}).is_success, "both")
        yield edge
    finally:
        fleet.close()


def ask(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json={"model": MODEL, **body}, timeout=WAIT_S)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (COMPLETIONS, {"echo": True, "logprobs": 1}, NO_PROMPT_LOGPROBS),
        (COMPLETIONS, {"structured_outputs": {"regex": "["}}, "regex"),
        (COMPLETIONS, {"structured_outputs": {"json": {"type": 5}}}, "type"),
        (COMPLETIONS, {"response_format": WRONG_SCHEMA}, "nothing"),
        (COMPLETIONS, {"vllm_xargs": {"tailrace_pace_tpot_ms": "abc"}}, "vllm_xargs.tailrace_pace_tpot_ms"),
        (COMPLETIONS, {"vllm_xargs": {"tailrace_pace": 1}}, "vllm_xargs.tailrace_pace: "),
        (COMPLETIONS, {"vllm_xargs": {"tailrace_" + "x" * 1_000: 1}}, "xxx...: "),
        (COMPLETIONS, {"vllm_xargs": {"tailrace_" + "x" * 20_000: 1}}, "at most 16,384 bytes"),
        (COMPLETIONS, {"prompt": "x" * 9_000}, "8192"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [99_999]}, "vocabulary"),
        (COMPLETIONS, {"logprobs": 100}, "100"),
        (COMPLETIONS, {"min_tokens": -1}, "min_tokens"),
        (COMPLETIONS, {"stop_token_ids": [99_999]}, "stop_token_ids"),
        (COMPLETIONS, {"logit_bias": {"99999": 1}}, "logit_bias"),
        (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, {"n": 0}, "n must be at least 1"),
        (CHATS, {"response_format": WRONG_SCHEMA}, "nothing"),
        (CHATS, {"tools": TOOLS}, "--tool-call-parser"),
        (CHATS, {"tools": TOOLS, "tool_choice": "required"}, "--tool-call-parser"),
        (CHATS, {"chat_template": "{{ x"}, "--trust-request-chat-template"),
        (CHATS, {"chat_template_kwargs": {"messages": 1}}, "messages"),
        (CHATS, {"messages": []}, "messages"),
    ],
)
def test_a_wrong_field_gets_400(url: str, path: str, body: dict[str, Any], reason: str, stream: bool) -> None:
    sent = {**(PROMPT if path == COMPLETIONS else CHAT), "max_tokens": 2, "stream": stream, **body}
    reply = ask(url, path, sent)
    assert reply.status_code == 400, reply.text
    assert reason in reply.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHATS, CHAT)])
def test_what_the_engine_refuses_gets_400(url: str, path: str, body: dict[str, Any]) -> None:
    reply = ask(url, path, {**body, "max_tokens": 2, "prompt_logprobs": 0})
    assert reply.status_code == 400, reply.text
    assert NO_PROMPT_LOGPROBS in json.loads(reply.text)["error"]["message"]
