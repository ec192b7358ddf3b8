"""Several models in one file and at one address, changed while they serve."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tailrace.tiny import MODEL_PATH
from tests.harness.chats import client
from tests.harness.processes import FAST_FRONT, wait_until
from tests.harness.rollouts import Load
from tests.harness.working_folder import WorkingFolder

pytestmark = [pytest.mark.fleet, pytest.mark.slow]

PROMPTS = ["Count down from 30 with wxyz, then from 20."]


def model(path: str, name: str, replicas: int = 1) -> dict[str, Any]:
    """Return a model of the file."""
    flags = {"served-model-name": name, "sim": ["speed=1"]}
    return {"model": path, "engine": "simulated", "front": FAST_FRONT, "replicas": replicas, "flags": flags}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[WorkingFolder]:
    place = WorkingFolder(tmp_path)
    yield place
    place.tailrace("down")


def write(here: WorkingFolder, *models: dict[str, Any]) -> None:
    """Write the file."""
    content = {"models": [*models], "http": f"127.0.0.1:{here.port}"}
    (here.path / "fleet.yaml").write_text(yaml.safe_dump(content))


def apply(here: WorkingFolder) -> list[str]:
    """Apply the file; return what is printed."""
    result = here.tailrace("apply", "-f", "fleet.yaml", "--yes")
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def test_models_come_and_go_while_others_serve(here: WorkingFolder) -> None:
    other = str(shutil.copytree(MODEL_PATH, here.path / "other"))
    tiny = model(str(MODEL_PATH), "tiny", 2)
    write(here, tiny, model(other, "org/Second"))
    up = here.tailrace("up", "-f", "fleet.yaml")
    assert up.returncode == 0, up.stderr
    api = client(f"http://127.0.0.1:{here.port}")

    def answers(name: str) -> bool:
        try:
            api.completions.create(model=name, prompt="x", max_tokens=2)
        except openai.APIStatusError as error:
            assert error.status_code in (404, 503)
            return False
        return True

    assert {each.id for each in api.models.list()} == {"tiny", "org/Second"}
    assert answers("org/Second")
    assert not answers("third")
    load = Load(f"http://127.0.0.1:{here.port}", PROMPTS, {}, 4)
    with load:
        wait_until(lambda: load.count() >= 4, "the first answers")
        write(here, tiny, model(other, "org/Second", 2), model(other, "third"))
        assert apply(here) == [
            "second-worker-1  start",
            "third-worker-0   start",
            "third-frontend   start",
            "applied",
        ]
        wait_until(lambda: answers("third"), "the third model to be served")
        write(here, tiny, model(other, "third"))
        printed = apply(here)
        assert {line.split()[0] for line in printed} == {
            "second-worker-0",
            "second-worker-1",
            "second-frontend",
            "applied",
        }
        wait_until(lambda: not answers("org/Second"), "the second model to be gone")
        assert answers("third")
        seen = load.count()
        wait_until(lambda: load.count() >= seen + 4, "answers of the first")
        load.stop()
    assert load.errors == []
    assert len({chat.answer for _, chat in load.answers}) == 1
