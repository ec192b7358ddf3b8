"""Slow: streams moved and workers killed at random for a while. `make soak`."""

from __future__ import annotations

import argparse
import random
import threading

import pytest

from examples import fifty_streams
from examples.fleet import Fleet as AdminFleet
from tests.e2e.conftest import SIMULATED_WORKERS
from tests.harness.chats import Chats
from tests.harness.fleet import Fleet
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1200)]

ROUNDS = 8
STREAMS = 30


def test_fifty_streams_moved_at_random_are_unchanged(vllm_fleet: Fleet) -> None:
    options = argparse.Namespace(url=f"{vllm_fleet.http}/v1", streams=50, seed=0)
    assert fifty_streams.run(options, AdminFleet(vllm_fleet.admin())) == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_workers_killed_and_frozen_at_random(
    simulated_fleet: Fleet, simulated_chats: Chats, seed: int
) -> None:
    draw = random.Random(seed)
    prompts = [f"Soak prompt number {n}." for n in range(STREAMS)]
    options: dict[str, object] = {"max_tokens": 600, "extra_body": {"min_tokens": 600}}
    alone = simulated_chats.run_all(prompts, **options)
    for _ in range(ROUNDS):
        futures = [simulated_chats.start(prompt, **options) for prompt in prompts]
        stop = threading.Event()
        mover = threading.Thread(target=_move_at_random, args=(simulated_fleet, draw.random(), stop))
        mover.start()
        victim = simulated_fleet.processes[draw.choice(SIMULATED_WORKERS)]
        threading.Event().wait(draw.uniform(0.2, 1.5))
        if draw.random() < 0.5:
            victim.kill()
        else:
            victim.freeze()
        ended = [future.result(timeout=WAIT_S) for future in futures]
        stop.set()
        # A move may wait for the frozen worker to report.
        simulated_fleet.repair()
        mover.join(timeout=WAIT_S)
        simulated_fleet.wait_instances(SIMULATED_WORKERS)
        assert all(a.same_text_and_usage(b) for a, b in zip(alone, ended, strict=True))
    simulated_fleet.wait_idle()


def _move_at_random(fleet: Fleet, seed: float, stop: threading.Event) -> None:
    draw = random.Random(seed)
    while not stop.wait(0.05):
        try:
            request = draw.choice(fleet.requests())
            fleet.migrate(request.request_id, draw.choice(SIMULATED_WORKERS))
        except Exception as refused:  # noqa: BLE001 - the fleet is being broken on purpose
            print(f"not moved: {refused}")
