"""Two models in one cluster: no answer mixes them, whichever process dies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import openai
import pytest

from examples.fleet import Chat
from tailrace.tiny import MODEL_PATH
from tests.e2e.conftest import RUST_FRONT
from tests.harness.chats import Chats
from tests.harness.fleet import Fleet
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(not RUST_FRONT.exists(), reason="no vllm-rs"),
]

PROMPTS = [f"Prompt {number} to two models." for number in range(6)]
OPTIONS: dict[str, object] = {"max_tokens": 250, "extra_body": {"min_tokens": 250}}
# For a minute: they cannot have ended when their worker is killed.
ENDLESS: dict[str, object] = {"max_tokens": 8_000, "extra_body": {"min_tokens": 8_000}}


class Model:
    """One of the two models: its workers, and clients of its front end."""

    def __init__(self, name: str, workers: tuple[str, str], http: str) -> None:
        self.name = name
        self.workers = workers
        self.chats = Chats(http)

    def begin(self, options: dict[str, object] = OPTIONS) -> list[Future[Chat]]:
        """Start a stream per prompt and wait until all of them have begun."""
        progress: list[list[Chat]] = [[] for _ in PROMPTS]
        started = zip(PROMPTS, progress, strict=True)
        streams = [self.chats.start(prompt, seen.append, **options) for prompt, seen in started]
        wait_until(lambda: all(progress), "the streams to begin")
        return streams


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, "simulated")
    try:
        fleet.start_control()
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def models(fleet: Fleet, tmp_path: Path) -> tuple[Model, Model]:
    """The tiny model, and one with the same configuration and tokenizer but different weights."""
    other = Path(shutil.copytree(MODEL_PATH, tmp_path / "other"))
    # A simulated engine's weights are a seed; the second front end identifies its model by name.
    (other / "model.safetensors").unlink()
    seeded = ["--sim", "weights_seed=1"]
    started_models = []
    for name, path, workers in (("first", MODEL_PATH, ("w0", "w2")), ("second", other, ("w1", "w3"))):
        for worker in workers:
            fleet.start_worker(worker, seeded if path is other else (), wait=False, model=str(path))
        fleet.start_frontend(
            "rust", f"frontend-{name}", model=str(path), options=["--place-wait", "1", "--resume-wait", "1"]
        )
        started_models.append(Model(name, workers, fleet.http))
    fleet.wait_instances(("w0", "w1", "w2", "w3"))
    for model in started_models:
        attached = f"frontend-{model.name}"
        wait_until(
            lambda: fleet.metric(attached, "tailrace_frontend_attached_instances") == 2,  # noqa: B023
            "both workers to be attached",
        )
    return started_models[0], started_models[1]


@pytest.mark.slow
def test_streams_continue_on_the_same_model_or_end_with_an_error(
    fleet: Fleet, models: tuple[Model, Model]
) -> None:
    first, second = models
    alone = {model.name: model.chats.run_all(PROMPTS, **OPTIONS) for model in models}
    pairs = zip(alone["first"], alone["second"], strict=True)
    assert not any(a.reasoning + a.answer == b.reasoning + b.answer for a, b in pairs)

    # One of a model's two instances dies: its streams continue on the other one, although those of the other
    # model have less load.
    streams = first.begin()
    other_streams = second.begin()
    fleet.processes[first.workers[0]].kill()
    for stream_future, expected in zip(streams, alone["first"], strict=True):
        assert stream_future.result(timeout=WAIT_S).same_text_and_usage(expected)
    for stream_future, expected in zip(other_streams, alone["second"], strict=True):
        assert stream_future.result(timeout=WAIT_S).same_text_and_usage(expected)

    # The last instance of the model dies: no instance can continue its streams.
    streams = first.begin(ENDLESS)
    fleet.processes[first.workers[1]].kill()
    for stream in streams:
        with pytest.raises(openai.OpenAIError):
            stream.result(timeout=WAIT_S)
    with pytest.raises(openai.OpenAIError):
        first.chats.run(PROMPTS[0], **OPTIONS)
    for again, expected in zip(second.chats.run_all(PROMPTS, **OPTIONS), alone["second"], strict=True):
        assert again.same_text_and_usage(expected)
