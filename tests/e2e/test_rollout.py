"""A rollout of a changed model under load: no request fails, and no answer is made by two models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from examples.fleet import Chat
from tailrace.tiny import MODEL_PATH
from tailrace.v1 import admin_pb2
from tests.e2e.chats import Chats
from tests.e2e.conftest import RUST_FRONT, VLLM_KV_BLOCKS
from tests.e2e.fleet import MODEL, Fleet
from tests.e2e.processes import wait_until
from tests.e2e.rollouts import Load, asked, changed_model, fingerprints, made_by

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(180)]

PROMPTS = [f"Prompt {number} of a model that is replaced." for number in range(12)]
OPTIONS: dict[str, object] = {"max_tokens": 500, "extra_body": {"min_tokens": 500}}
OLD, NEW = ("w0", "w1"), ("w2", "w3")
FRONTS = ("frontend-0", "frontend-1")


def open_fleet(root: Path, engine: str, new: Path, new_options: Sequence[str]) -> Fleet:
    """Two workers of the old model behind two front ends on one port, and two of the new one that nobody uses
    yet."""
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
        fleet.wait_instances((*OLD, *NEW), 180)
    except BaseException:
        fleet.close()
        raise
    return fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Of simulated engines, whose weights are a seed."""
    fleet = open_fleet(tmp_path, "simulated", MODEL_PATH, ["--engine-arg", "weights_seed=1"])
    yield fleet
    fleet.close()


@pytest.fixture
def vllm_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Of real engines; the new model is the tiny one with other weights."""
    fleet = open_fleet(tmp_path, "vllm", changed_model(tmp_path / "changed"), [])
    yield fleet
    fleet.close()


def alone(fleet: Fleet, options: dict[str, object]) -> dict[str, Chat]:
    """What each prompt gives with the model that takes new requests."""
    chats = Chats(fleet.http)
    try:
        return dict(zip(PROMPTS, chats.run_all(PROMPTS, **options), strict=True))
    finally:
        chats.close()


def metric(fleet: Fleet, names: Sequence[str], series: str) -> float:
    """Summed over these services."""
    return sum(fleet.metric(name, series) for name in names)


def roll_out_and_back(fleet: Fleet, clients: int) -> None:
    """Under load: to the new model, and back to the old one, whose workers are still there."""
    of = fingerprints(fleet)
    assert of["w0"] == of["w1"] != of["w2"] == of["w3"]
    before = alone(fleet, OPTIONS)
    with Load(fleet.http, PROMPTS, OPTIONS, clients) as load:
        wait_until(lambda: load.count() >= clients, "answers of the old model", 60)
        moved = metric(fleet, FRONTS, "tailrace_frontend_adoptions_total")

        done = asked(fleet, "start", MODEL, "--to", of["w2"], "--timeout", "120")
        print(done.stderr, done.stdout)
        assert done.returncode == 0, done.stderr
        assert done.stdout == (
            f"{MODEL}: done: new requests go to {of['w2']}, and no request of {of['w0']} is left\n"
        )
        # The old ones were emptied one after the other, the first by moving its requests to the second.
        assert metric(fleet, FRONTS, "tailrace_frontend_adoptions_total") > moved
        assert metric(fleet, OLD, "tailrace_worker_requests") == 0
        after = alone(fleet, OPTIONS)
        assert not any(before[prompt].same_text_and_usage(after[prompt]) for prompt in PROMPTS)

        back = asked(fleet, "undo", MODEL, "--timeout", "120")
        assert back.returncode == 0, back.stderr
        assert f"done: new requests go to {of['w0']} again" in back.stdout
        assert metric(fleet, NEW, "tailrace_worker_requests") == 0
        seen = load.count()
        wait_until(lambda: load.count() >= seen + clients, "answers of the old model", 60)
        load.stop()
    counts = made_by(load, {"old": before, "new": after})
    print(counts)
    assert (load.errors, counts["mixed"]) == ([], 0)
    assert min(counts["old"], counts["new"]) >= clients


@pytest.mark.slow
def test_a_rollout_and_its_undoing_under_load(fleet: Fleet) -> None:
    roll_out_and_back(fleet, 12)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_rollout_of_real_engines(vllm_fleet: Fleet) -> None:
    roll_out_and_back(vllm_fleet, 8)


@pytest.mark.slow
def test_a_rollout_in_which_processes_die(fleet: Fleet) -> None:
    """The leading scheduler, an old worker and a new one: nothing is mixed, and nothing fails as long as one
    of each model is left."""
    of = fingerprints(fleet)
    before = alone(fleet, OPTIONS)
    with Load(fleet.http, PROMPTS, OPTIONS, clients=12) as load:
        wait_until(lambda: load.count() >= 12, "answers of the old model", 60)
        leader = fleet.leader()
        fleet.admin(leader).Rollout(admin_pb2.RolloutRequest(model=MODEL, to=of["w2"]), timeout=5)
        for name in (leader, "w0", "w3"):
            fleet.processes[name].kill()
        fleet.wait_leader()
        done = asked(fleet, "start", MODEL, "--to", of["w2"], "--timeout", "120")
        assert done.returncode == 0, done.stderr
        after = alone(fleet, OPTIONS)
        load.stop()
    counts = made_by(load, {"old": before, "new": after})
    assert (load.errors, counts["mixed"]) == ([], 0)
    assert counts["old"] and counts["new"]
