"""A rollout of a changed model under load: no request fails, and no answer mixes two models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from examples.fleet import Chat
from tailrace.tiny import MODEL_PATH
from tailrace.v1 import admin_pb2
from tests.e2e.conftest import RUST_FRONT, VLLM_KV_BLOCKS
from tests.harness.chats import Chats
from tests.harness.fleet import MODEL, Fleet
from tests.harness.processes import wait_until
from tests.harness.rollouts import Load, changed_model, count_by_model, fingerprints, run_rollout
from tests.harness.tries import TRIES, once_available
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

PROMPTS = [f"Prompt {number} of a model that is replaced." for number in range(12)]
OPTIONS: dict[str, object] = {"max_tokens": 500, "extra_body": {"min_tokens": 500}}
OLD, NEW = ("w0", "w1"), ("w2", "w3")
FRONTS = ("frontend-0", "frontend-1")


def start_fleet(root: Path, engine: str, new: Path, new_options: Sequence[str]) -> Fleet:
    """Start two workers of the old model behind two front ends on one port, and two unused new ones."""
    fleet = Fleet(root, engine)
    try:
        fleet.start_control(schedulers=2)
        blocks = ["--kv-blocks", VLLM_KV_BLOCKS] if engine == "vllm" else []
        for name in OLD:
            fleet.start_worker(name, blocks, wait=False)
        for name in NEW:
            fleet.start_worker(name, [*blocks, *new_options], wait=False, model=str(new))
        front = "rust" if RUST_FRONT.exists() else "python"
        fleet.start_frontend(front, FRONTS[0])
        fleet.start_frontend(front, FRONTS[1], http_port=int(fleet.http.rpartition(":")[2]))
        fleet.wait_instances((*OLD, *NEW))
    except BaseException:
        fleet.close()
        raise
    return fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Fleet of simulated engines, whose weights are a seed."""
    fleet = start_fleet(tmp_path, "simulated", MODEL_PATH, ["--sim", "weights_seed=1"])
    yield fleet
    fleet.close()


@pytest.fixture
def vllm_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Fleet of real engines; the new model is the tiny one with other weights."""
    # As the tiny model: rounded to bfloat16, the next token can depend on what else is in the batch.
    new_options = ["--dtype", "float32"]
    fleet = start_fleet(tmp_path, "vllm", changed_model(tmp_path / "changed"), new_options)
    yield fleet
    fleet.close()


def answers_of_current_model(fleet: Fleet, options: dict[str, object]) -> dict[str, Chat]:
    """Return the answer to each prompt by the model that takes new requests."""
    chats = Chats(fleet.http)
    try:
        return dict(zip(PROMPTS, chats.run_all(PROMPTS, **options), strict=True))
    finally:
        chats.close()


def metric(fleet: Fleet, names: Sequence[str], series: str) -> float:
    """Return a metric summed over these services."""
    return sum(fleet.metric(name, series) for name in names)


def roll_out_and_back(fleet: Fleet, clients: int) -> None:
    """Roll out the new model under load, and undo it while the old model's workers still run."""
    models = fingerprints(fleet)
    assert models["w0"] == models["w1"] != models["w2"] == models["w3"]
    before = answers_of_current_model(fleet, OPTIONS)
    with Load(fleet.http, PROMPTS, OPTIONS, clients) as load:
        wait_until(lambda: load.count() >= clients, "answers of the old model")
        for _ in range(TRIES):
            moved = metric(fleet, FRONTS, "tailrace_frontend_adoptions_total")
            roll_out(fleet, models)
            if metric(fleet, FRONTS, "tailrace_frontend_adoptions_total") > moved:
                break
            # On a busy machine the answers of the old model may end before its workers are drained.
            roll_back(fleet, models)
            count_before = load.count()
            wait_until(lambda: load.count() >= count_before + clients, "answers of the old model")  # noqa: B023
        count_done = load.count()
        # The old workers were drained one after the other, the first by moving its requests to the second.
        assert metric(fleet, FRONTS, "tailrace_frontend_adoptions_total") > moved
        assert metric(fleet, OLD, "tailrace_worker_requests") == 0
        after = answers_of_current_model(fleet, OPTIONS)
        assert not any(before[prompt].same_text_and_usage(after[prompt]) for prompt in PROMPTS)
        wait_until(lambda: load.count() >= count_done + clients, "answers of the new model")

        roll_back(fleet, models)
        count_before = load.count()
        wait_until(lambda: load.count() >= count_before + clients, "answers of the old model")
        load.stop()
    counts = count_by_model(load, {"old": before, "new": after})
    print(counts)
    assert (load.errors, counts["mixed"]) == ([], 0)
    assert min(counts["old"], counts["new"]) >= clients


def roll_out(fleet: Fleet, models: dict[str, str]) -> None:
    """Roll out the new model."""
    result = run_rollout(fleet, "start", MODEL, "--to", models["w2"], "--timeout", f"{WAIT_S:g}")
    print(result.stderr, result.stdout)
    assert result.returncode == 0, result.stderr
    assert result.stdout == (
        f"{MODEL}: done: new requests go to {models['w2']}, and no request of {models['w0']} is left\n"
    )


def roll_back(fleet: Fleet, models: dict[str, str]) -> None:
    """Undo that."""
    back = run_rollout(fleet, "undo", MODEL, "--timeout", f"{WAIT_S:g}")
    assert back.returncode == 0, back.stderr
    assert f"done: new requests go to {models['w0']} again" in back.stdout
    assert metric(fleet, NEW, "tailrace_worker_requests") == 0


@pytest.mark.slow
def test_rollout_and_undo_under_load(fleet: Fleet) -> None:
    roll_out_and_back(fleet, 12)


@pytest.mark.slow
@pytest.mark.vllm
def test_rollout_with_real_engines(vllm_fleet: Fleet) -> None:
    roll_out_and_back(vllm_fleet, 8)


@pytest.mark.slow
def test_rollout_survives_process_deaths(fleet: Fleet) -> None:
    """Kill the leading scheduler and a worker of each model: no answer is mixed, and no request fails."""
    models = fingerprints(fleet)
    before = answers_of_current_model(fleet, OPTIONS)
    with Load(fleet.http, PROMPTS, OPTIONS, clients=12) as load:
        wait_until(lambda: load.count() >= 12, "answers of the old model")
        leader = fleet.leader()
        request = admin_pb2.RolloutRequest(model=MODEL, to=models["w2"])
        once_available(lambda: fleet.admin(leader).Rollout(request, timeout=WAIT_S))
        for name in (leader, "w0", "w3"):
            fleet.processes[name].kill()
        fleet.wait_leader()
        result = run_rollout(fleet, "start", MODEL, "--to", models["w2"], "--timeout", f"{WAIT_S:g}")
        assert result.returncode == 0, result.stderr
        after = answers_of_current_model(fleet, OPTIONS)
        load.stop()
    counts = count_by_model(load, {"old": before, "new": after})
    assert (load.errors, counts["mixed"]) == ([], 0)
    assert counts["old"] and counts["new"]
