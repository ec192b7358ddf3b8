"""Several models in one file and at one address, changed while they serve."""

from __future__ import annotations

import json
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


def write(here: WorkingFolder, *models: dict[str, Any], **more: Any) -> None:
    """Write the file."""
    content = {"models": [*models], "http": f"127.0.0.1:{here.port}", **more}
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


def test_each_model_has_a_policy_of_its_own(here: WorkingFolder) -> None:
    other = str(shutil.copytree(MODEL_PATH, here.path / "other"))
    tiny = model(str(MODEL_PATH), "tiny")
    # The same weights with a policy of their own are another model.
    second = model(str(MODEL_PATH), "second") | {
        "policy": {"name": "pascal", "parameters": {"quantum_tokens": 250}},
        "slo": {"ttft": "3s"},
    }
    third = model(other, "third") | {"slo": {"tpot": "90ms"}}
    fleet = {"policy": {"name": "least_loaded"}, "slo": {"ttft": "1s"}, "tls": True}
    write(here, tiny, second, **fleet)
    up = here.tailrace("up", "-f", "fleet.yaml")
    assert up.returncode == 0, up.stderr
    assert "of its own: second" in up.stdout
    api = client(f"http://127.0.0.1:{here.port}")

    def read(*command: str) -> Any:
        done = here.tailrace(*command, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def policies() -> dict[str, str]:
        """Return the active policy of each model."""
        found = {}
        for name in here.state().models:
            listed = read("get", "policies", "--model", name)["policies"]
            found[name] = next(each["name"] for each in listed if each["active"])
        return found

    def slos() -> dict[str, tuple[float, float]]:
        found = {name: read("get", "slo", "--model", name)["slo"] for name in here.state().models}
        return {name: (each["ttft_s"], each["tpot_s"]) for name, each in found.items()}

    def answers(*names: str) -> None:
        for name in names:
            assert api.completions.create(model=name, prompt="x", max_tokens=2).choices[0].text

    usual = slos()["tiny"][1]
    assert policies() == {"tiny": "least_loaded", "second": "pascal"}
    assert slos() == {"tiny": (1.0, usual), "second": (3.0, usual)}
    answers("tiny", "second")
    assert here.tailrace("set", "policy", "arrow", "--model", "second").returncode == 0
    assert here.tailrace("set", "slo", "ttft=5s", "--model", "second").returncode == 0
    assert policies() == {"tiny": "least_loaded", "second": "arrow"}
    assert slos() == {"tiny": (1.0, usual), "second": (5.0, usual)}
    instances = read("get", "instances", "--model", "second")["instances"]
    assert [each["instance_id"] for each in instances] == ["second-worker-0"]
    unknown = here.tailrace("get", "instances", "--model", "secnd")
    assert unknown.returncode == 2
    assert "tiny, second (did you mean 'second'?)" in unknown.stderr

    write(here, tiny, second, third, **fleet)
    printed = apply(here)
    assert [" ".join(line.split()) for line in printed[:4]] == [
        "policy of second arrow -> pascal quantum_tokens=250",
        "slo of second ttft 5 -> 3",
        "policy of third least_loaded",
        "slo of third tpot 0.09",
    ]
    assert [line.split()[0] for line in printed[4:-1]] == [
        "third-monitor",
        "third-migration",
        "third-scheduler",
        "third-worker-0",
        "third-frontend",
    ]
    assert policies() == {"tiny": "least_loaded", "second": "pascal", "third": "least_loaded"}
    assert slos() == {"tiny": (1.0, usual), "second": (3.0, usual), "third": (2.0, 0.09)}
    wait_until(lambda: "third" in {each.id for each in api.models.list()}, "the third model")
    answers("tiny", "second", "third")
    assert apply(here) == ["nothing to change: the cluster is as the file says"]
    doctor = here.tailrace("doctor", "-f", "fleet.yaml")
    assert "second: policy: pascal" in doctor.stdout and "third: instances: 1" in doctor.stdout

    # Moving a running model to another cluster would end its streams.
    write(here, tiny | {"slo": {"ttft": "1s"}}, second, third, **fleet)
    refused = here.tailrace("apply", "-f", "fleet.yaml", "--yes")
    assert refused.returncode == 2 and "has a cluster of its own" in refused.stderr
    write(here, tiny, third, **fleet)
    gone = ["monitor", "migration", "scheduler", "worker-0", "frontend"]
    assert {line.split()[0] for line in apply(here)} == {*(f"second-{part}" for part in gone), "applied"}
    assert [*here.state().models] == ["tiny", "third"]
    wait_until(lambda: "second" not in {each.id for each in api.models.list()}, "the second model to be gone")
    answers("tiny", "third")
