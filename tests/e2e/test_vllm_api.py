"""What vLLM's API makes several requests of, or answers with the first token: moved, it is the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import pytest
from openai import BadRequestError, OpenAI
from openai.types import Completion

from benchmarks.features.vision import image_url
from tailrace.tiny.task import task
from tailrace.tiny.tokens import encode_turns
from tailrace.v1 import types_pb2
from tests.e2e.chats import client
from tests.e2e.conftest import VLLM_WORKERS
from tests.e2e.fleet import MODEL, Fleet
from tests.e2e.processes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

PROMPT = encode_turns([("user", task("wxyz", 60, 20).prompt)])
TOKENS = 400
TRIES = 5
GENERATED = "tailrace_worker_generated_tokens_total"
ENDED = ("the export has ended", "has finished", "is not running here", "is not on this engine")


@pytest.fixture
def api(vllm_fleet: Fleet) -> OpenAI:
    return client(vllm_fleet.http)


def texts(answer: Completion) -> list[tuple[int, str, str | None]]:
    return [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices]


def moved(fleet: Fleet, ask: Callable[[], Completion], requests: int) -> tuple[Completion, int]:
    """The answer, and how many of its requests were moved while they ran."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        count = sum(_moved(fleet, name, here) for name, here in _under_way(fleet, answer, requests))
        return answer.result(timeout=120), count


def _under_way(fleet: Fleet, answer: Future[Completion], requests: int) -> list[tuple[str, str]]:
    """Its requests, each with some tokens, and where they are."""
    found: list[tuple[str, str]] = []

    def there() -> bool:
        found[:] = [(r.request_id, r.instance_id) for r in fleet.requests() if r.output_tokens >= 5]
        return answer.done() or len(found) >= requests

    wait_until(there, f"{requests} requests under way", 60)
    return found


def _moved(fleet: Fleet, request_id: str, here: str) -> bool:
    target = next(name for name in VLLM_WORKERS if name != here)
    try:
        record = fleet.migrate(request_id, target)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND, error
        return False
    assert record.state == types_pb2.MIGRATION_STATE_COMMITTED or record.error.endswith(ENDED), record.error
    return record.state == types_pb2.MIGRATION_STATE_COMMITTED


def same_when_moved(
    fleet: Fleet, ask: Callable[[], Completion], requests: int
) -> tuple[Completion, Completion]:
    """The undisturbed answer, and one of which all requests were moved; again if some ended before."""
    undisturbed = ask()
    for _ in range(TRIES):
        answer, count = moved(fleet, ask, requests)
        assert texts(answer) == texts(undisturbed)
        if count == requests:
            return undisturbed, answer
    pytest.fail(f"no {requests} requests were moved before they ended, {TRIES} times")


def test_several_answers_to_one_prompt(vllm_fleet: Fleet, api: OpenAI) -> None:
    """`n` is so many requests, each with a seed of its own, placed and moved by themselves."""

    def ask() -> Completion:
        return api.completions.create(
            model=MODEL, prompt=PROMPT, n=3, seed=11, temperature=1.0, max_tokens=TOKENS
        )

    undisturbed, _ = same_when_moved(vllm_fleet, ask, 3)
    assert sorted(choice.index for choice in undisturbed.choices) == [0, 1, 2]


def test_log_probabilities_of_the_prompt(vllm_fleet: Fleet, api: OpenAI) -> None:
    """They come once, with the first token, wherever the request ends."""

    def ask() -> Completion:
        return api.completions.create(
            model=MODEL,
            prompt=PROMPT,
            temperature=0,
            max_tokens=TOKENS,
            extra_body={"prompt_logprobs": 1, "ignore_eos": True},
        )

    undisturbed, answer = same_when_moved(vllm_fleet, ask, 1)
    wanted, found = ((each.choices[0].model_extra or {})["prompt_logprobs"] for each in (undisturbed, answer))
    assert len(wanted) == len(PROMPT) and found == wanted


def test_beam_search(vllm_fleet: Fleet, api: OpenAI) -> None:
    """vLLM's API server searches with requests of one token; they go to whichever worker."""

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
    worked = [name for name in VLLM_WORKERS if vllm_fleet.metric(name, GENERATED) > before[name]]
    assert len(worked) > 1
    # The tiny model is sure of its answers: its best beam is what it says.
    greedy = api.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=12)
    assert first.choices[0].text == greedy.choices[0].text


def test_an_image_for_a_model_that_sees_none(api: OpenAI) -> None:
    """The user's mistake, and told as such."""
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
