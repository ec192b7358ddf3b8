"""API calls that vLLM splits into several requests or answers with the first token: unchanged when moved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import grpc
import pytest
from openai import BadRequestError, OpenAI
from openai.types import Completion

from experiments.tiny.tokens import encode_turns
from tailrace.request_ids import matching
from tailrace.tiny.task import task
from tailrace.v1 import types_pb2
from tests.e2e.conftest import JSON_WORKER, VLLM_WORKERS
from tests.features.vision import image_url
from tests.harness.chats import client
from tests.harness.fleet import MODEL, Fleet, request_had_ended
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

pytestmark = pytest.mark.vllm

PROMPT = encode_turns([("user", task("wxyz", 60, 20).prompt)])
# A fast engine makes the first of these before anybody has heard of the request.
TOKENS = (350, 700, 1_400, 2_800, 2_800)
GENERATED = "tailrace_worker_generated_tokens_total"


@pytest.fixture
def api(vllm_fleet: Fleet) -> OpenAI:
    return client(vllm_fleet.http)


def texts(answer: Completion) -> list[tuple[int, str, str | None]]:
    return [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices]


def run_and_move(fleet: Fleet, ask: Callable[[], Completion], requests: int) -> tuple[Completion, int]:
    """Return the answer, and how many of its requests were moved while they ran."""
    with ThreadPoolExecutor(1 + requests) as pool:
        answer = pool.submit(ask)
        running = _wait_running(fleet, answer, requests)
        # All at once, so that the last one has not ended by its turn.
        moves = [pool.submit(_move, fleet, name, source) for name, source in running]
        return answer.result(timeout=WAIT_S), sum(move.result(timeout=WAIT_S) for move in moves)


def _wait_running(fleet: Fleet, answer: Future[Completion], requests: int) -> list[tuple[str, str]]:
    """Wait until the answer's requests have some tokens; return their IDs and instances."""
    found: list[tuple[str, str]] = []

    def all_running() -> bool:
        found[:] = [(r.request_id, r.instance_id) for r in fleet.requests() if r.output_tokens >= 5]
        return answer.done() or len(found) >= requests

    wait_until(all_running, f"{requests} running requests")
    return found


def _move(fleet: Fleet, request_id: str, source: str) -> bool:
    target = next(name for name in VLLM_WORKERS if name != source)
    try:
        record = fleet.migrate(request_id, target)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND, error
        return False
    if record.state == types_pb2.MIGRATION_STATE_COMMITTED:
        return True
    # On a machine with too much to do, a worker may be late, and the request stays where it was.
    assert request_had_ended(record) or "did not answer within" in record.error, record.error
    return False


def check_moved(
    fleet: Fleet, ask: Callable[[int], Completion], requests: int
) -> tuple[Completion, Completion]:
    """Return the undisturbed answer and an equal one with all requests moved; ask for a longer one if some
    ended first. `ask(tokens)`: for so many tokens."""
    for tokens in TOKENS:
        undisturbed = ask(tokens)
        answer, count = run_and_move(fleet, partial(ask, tokens), requests)
        assert texts(answer) == texts(undisturbed)
        if count == requests:
            return undisturbed, answer
    pytest.fail(f"no {requests} requests were moved before they ended, {len(TOKENS)} times")


def objects_of(log: str) -> list[dict[str, str]]:
    """Return the lines of a log but for those that native libraries print."""
    lines = log.splitlines()
    text = [line for line in lines if not line.startswith("{")]
    assert not [line for line in text if re.search(r"\b(DEBUG|INFO|WARNING|ERROR)\b", line)]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_each_line_of_a_log_is_an_object(vllm_fleet: Fleet, api: OpenAI) -> None:
    """Also those of vLLM; and the access log has the id by which the fleet knows a request."""
    api.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=2, extra_headers={"X-Request-Id": "one of the user's"}
    )
    lines = {name: objects_of(vllm_fleet.processes[name].text()) for name in (JSON_WORKER, "frontend")}
    loggers = {line["logger"].partition(".")[0] for line in lines[JSON_WORKER]}
    assert {"vllm", "worker_agent"} <= loggers
    assert {(line["service"], line["id"]) for line in lines[JSON_WORKER]} == {("worker", JSON_WORKER)}
    known = {line["request_id"]: line for line in lines["frontend"] if "request_id" in line}
    (answered,) = (known[each] for each in matching("one of the user's", known))
    assert answered["logger"] == "uvicorn.access"


def test_several_choices_for_one_prompt(vllm_fleet: Fleet, api: OpenAI) -> None:
    """`n` makes that many requests with different seeds, each placed and moved on its own."""

    def ask(tokens: int) -> Completion:
        return api.completions.create(
            model=MODEL, prompt=PROMPT, n=3, seed=11, temperature=1.0, max_tokens=tokens,
            extra_body={"ignore_eos": True},
        )  # fmt: skip

    undisturbed, _ = check_moved(vllm_fleet, ask, 3)
    assert sorted(choice.index for choice in undisturbed.choices) == [0, 1, 2]


def test_prompt_log_probabilities(vllm_fleet: Fleet, api: OpenAI) -> None:
    """They arrive once, with the first token, wherever the request ends."""

    def ask(tokens: int) -> Completion:
        return api.completions.create(
            model=MODEL,
            prompt=PROMPT,
            temperature=0,
            max_tokens=tokens,
            extra_body={"prompt_logprobs": 1, "ignore_eos": True},
        )

    undisturbed, answer = check_moved(vllm_fleet, ask, 1)
    expected, found = (
        (each.choices[0].model_extra or {})["prompt_logprobs"] for each in (undisturbed, answer)
    )
    assert len(expected) == len(PROMPT) and found == expected


def test_beam_search(vllm_fleet: Fleet, api: OpenAI) -> None:
    """vLLM's API server searches with requests of one token, which any worker may get."""

    def ask() -> Completion:
        return api.completions.create(
            model=MODEL,
            prompt=PROMPT,
            n=3,
            temperature=0,
            max_tokens=12,
            extra_body={"use_beam_search": True},
        )

    before = {name: vllm_fleet.metric(name, GENERATED) for name in VLLM_WORKERS}
    first = ask()
    assert len({choice.text for choice in first.choices}) == 3
    assert texts(ask()) == texts(first)
    busy = [name for name in VLLM_WORKERS if vllm_fleet.metric(name, GENERATED) > before[name]]
    assert len(busy) > 1
    # The tiny model is certain of its answers, so its best beam equals its greedy answer.
    greedy = api.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=12)
    assert first.choices[0].text == greedy.choices[0].text


def test_image_for_a_text_model_is_refused(api: OpenAI) -> None:
    """It is reported as an error in the request."""
    content = [
        {"type": "image_url", "image_url": {"url": image_url(1)}},
        {"type": "text", "text": "What is in it?"},
    ]
    with pytest.raises(BadRequestError, match="not a multimodal model"):
        api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
            max_tokens=5,
        )
