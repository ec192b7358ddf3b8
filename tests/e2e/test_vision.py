"""Image prompts on real engines: placed, moved once the prompt is computed, recovered when a worker dies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from examples.fleet import Chat, Prompt, stream_chat
from tailrace.v1 import migration_pb2, types_pb2
from tests.features.vision import image_url, make_vision_model
from tests.harness.chats import Chats, client
from tests.harness.fleet import MODEL, Fleet
from tests.harness.tries import before_it_ends
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WORKERS = ("w0", "w1")
START_S = 300
# Enough for two moves, each of which waits for reports, on a fast machine.
TOKENS = 1_500
OPTIONS = {"temperature": 0, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("vision")
    model = str(make_vision_model(root / "model"))
    fleet = Fleet(root, "vllm")
    try:
        fleet.start_control()
        for name in WORKERS:
            options = ["--dtype", "float32", "--kv-blocks", "512"]
            fleet.start_worker(name, options, wait=False, model=model)
        fleet.start_frontend(options=["--dtype", "float32"], model=model)
        for name in WORKERS:
            fleet.wait_healthy(name, START_S)
        fleet.wait_instances(WORKERS)
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def chats(fleet: Fleet) -> Iterator[Chats]:
    fleet.repair(START_S)
    fleet.wait_instances(WORKERS)
    clients = Chats(fleet.http)
    yield clients
    clients.close()


def image_prompt(number: int) -> Prompt:
    return [
        {"type": "image_url", "image_url": {"url": image_url(number)}},
        {"type": "text", "text": "What is in it?"},
    ]


def undisturbed(fleet: Fleet, number: int) -> Chat:
    return stream_chat(client(fleet.http), MODEL, image_prompt(number), OPTIONS)


def assert_same(chat: Chat, expected: Chat) -> None:
    assert chat.completion_tokens == TOKENS
    assert chat.same_text_and_usage(expected)


def test_answers_depend_on_the_image(fleet: Fleet, chats: Chats) -> None:
    one, other = (undisturbed(fleet, number) for number in (1, 2))
    assert one.reasoning != other.reasoning


def test_image_request_moves_live(fleet: Fleet, chats: Chats) -> None:
    expected = undisturbed(fleet, 3)

    def moved() -> tuple[Future[Chat], list[migration_pb2.MigrationRecord]]:
        stream, request_id, source = stream_of(fleet, chats, 3)
        other_worker = next(name for name in WORKERS if name != source)
        return stream, [fleet.move(request_id, target) for target in (other_worker, source)]

    stream, records = before_it_ends(moved)
    assert [record.way for record in records] == [types_pb2.WAY_LIVE] * 2
    assert_same(stream.result(timeout=WAIT_S), expected)


def test_image_request_is_recovered(fleet: Fleet, chats: Chats) -> None:
    """The image is processed again where the request continues."""
    expected = undisturbed(fleet, 4)
    stream, _, source = before_it_ends(lambda: stream_of(fleet, chats, 4))
    fleet.processes[source].kill()
    assert_same(stream.result(timeout=WAIT_S), expected)


def stream_of(fleet: Fleet, chats: Chats, number: int) -> tuple[Future[Chat], str, str]:
    """Start a stream; return it, its request ID and its instance. Raise RequestEnded if it ends before."""
    stream, chat = chats.begin(image_prompt(number), **OPTIONS)
    placed = fleet.wait_request(chat.request_id, ended=stream.done)
    return stream, placed.request_id, placed.instance_id
