"""A model that goes to zero and back beside one that serves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tailrace.tiny import MODEL_PATH
from tests.cli.test_models import PROMPTS, apply, model
from tests.harness.chats import client
from tests.harness.processes import wait_until
from tests.harness.rollouts import Load
from tests.harness.working_folder import WorkingFolder

pytestmark = [pytest.mark.fleet, pytest.mark.slow]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[WorkingFolder]:
    place = WorkingFolder(tmp_path)
    yield place
    place.tailrace("down")


def write(here: WorkingFolder, most: int = 2) -> None:
    """Write a file with two models, of which one is scaled."""
    other = here.path / "other"
    if not other.exists():
        shutil.copytree(MODEL_PATH, other)
        config = json.loads((other / "config.json").read_text())
        # Its instances must not answer for the first model.
        (other / "config.json").write_text(json.dumps(config | {"initializer_range": 0.0201}))
    scaled = model(str(other), "other", 1) | {"autoscale": {"max": most, "cooldown": "5s"}}
    content = {"models": [model(str(MODEL_PATH), "tiny"), scaled], "http": f"127.0.0.1:{here.port}"}
    (here.path / "fleet.yaml").write_text(yaml.safe_dump(content))


def workers(here: WorkingFolder) -> list[str]:
    """Return the workers of the scaled model that run."""
    parts = here.state().parts
    return [part.name for part in parts if part.name.startswith("other-worker") and part.identity.alive()]


def kill(here: WorkingFolder, name: str) -> None:
    """Kill a part."""
    (part,) = (part for part in here.state().parts if part.name == name)
    os.kill(part.identity.pid, signal.SIGKILL)
    wait_until(lambda: not part.identity.alive(), f"{name} to end")


def test_a_model_goes_to_zero_and_back_while_another_serves(here: WorkingFolder) -> None:
    write(here)
    up = here.tailrace("up", "-f", "fleet.yaml")
    assert up.returncode == 0, up.stderr
    http = f"http://127.0.0.1:{here.port}"
    api = client(http)

    def answered_s(tokens: int = 2) -> float:
        began_s = time.monotonic()
        answer = api.completions.create(
            model="other", prompt="x", max_tokens=tokens, extra_body={"min_tokens": tokens}
        )
        assert answer.usage is not None and answer.usage.completion_tokens == tokens
        return time.monotonic() - began_s

    @contextmanager
    def streaming() -> Iterator[None]:
        """Keep a stream of the scaled model for the block, with which an instance stays."""
        stream = api.completions.create(
            model="other", prompt="x", max_tokens=8_000, stream=True, extra_body={"min_tokens": 8_000}
        )
        with stream:
            next(iter(stream))
            yield

    with streaming():
        assert workers(here) == ["other-worker-0"]
    with Load(http, PROMPTS, {}, 2) as load:
        wait_until(lambda: load.count() >= 2, "the first answers")
        print(f"with an instance: {answered_s():.2f} s")
        wait_until(lambda: not workers(here), "the model to go to zero")
        print(f"from zero: {answered_s():.2f} s")
        # What it drains for a long answer, it hands over or finishes.
        assert answered_s(500) > 0.0
        wait_until(lambda: not workers(here), "the model to go to zero again")
        # Neither the scaler nor the scheduler has to live through it.
        kill(here, "scaler")
        assert here.tailrace("restart", "scaler").returncode == 0
        print(f"from zero, by another scaler: {answered_s():.2f} s")
        kill(here, "scheduler")
        assert here.tailrace("restart", "scheduler").returncode == 0
        wait_until(lambda: not workers(here), "the model to go to zero after that")
        # What runs stays as it is.
        with streaming():
            write(here, most=3)
            assert apply(here) == [f"{here.path}/other  autoscale 0 to 2 -> 0 to 3", "applied"]
            assert workers(here) == ["other-worker-0"]
        seen = load.count()
        wait_until(lambda: load.count() >= seen + 2, "answers of the first")
        load.stop()
    assert load.errors == []
    parts = here.state().parts
    assert here.tailrace("down").returncode == 0
    assert not [part.name for part in parts if part.identity.session_members()]
