"""CascadeInfer with its defaults forms stages live under a load under which it does so in the simulator."""

from __future__ import annotations

import asyncio
import math
import random
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from simulator.cluster import ClusterSpec
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import simulate
from tailrace.policy.cascade.layout import tiles
from tailrace.policy.deployment import Deployment
from tailrace.profiles import load_profile
from tests.live.fleet import Fleet, open_fleet
from tests.waiting import WAIT_S
from worker_agent.engine.simulated.settings import at_speed

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

PROFILE, SPEED, INSTANCES, SEATS = "llama-3.1-8b-h100", 0.2, 4, 64
# The default `replan_s`, a tick, and time to write the stages.
SECONDS = 75.0


def _requests(seed: int) -> list[SimRequest]:
    """Return four requests a second, with prompts from tens to thousands of tokens, evenly by magnitude."""
    rng = random.Random(seed)
    requests: list[SimRequest] = []
    at_s = rng.expovariate(4.0)
    while at_s < SECONDS:
        prompt = int(math.exp(rng.uniform(math.log(50), math.log(16_000))))
        requests.append(SimRequest(f"r{len(requests)}", at_s, prompt, 0, rng.randint(100, 400)))
        at_s += rng.expovariate(4.0)
    return requests


def _simulated_stages(requests: Sequence[SimRequest]) -> int:
    """Return the number of stages after a minute."""
    profile = at_speed(load_profile(PROFILE), SPEED)
    setup = setup_for("cascade")
    spec = setup.apply(ClusterSpec.uniform(INSTANCES, profile, max_num_seqs=SEATS))
    policy = setup.policy(Deployment(profile=load_profile(PROFILE)))
    series = simulate(spec, requests, policy, setup.intra(), sample_interval_s=5.0).series
    assert series is not None
    return max(len(change.stages) for change in series.stages)


async def _send(fleet: Fleet, requests: Sequence[SimRequest]) -> None:
    """Send the requests until there are stages; again and again, since a busy machine may take longer."""
    while True:
        began_s = asyncio.get_running_loop().time()
        for request in requests:
            await asyncio.sleep(began_s + request.arrival_s - asyncio.get_running_loop().time())
            if fleet.members.stages:
                return
            await fleet.send(request.prompt_tokens, 0, request.answer_tokens)


async def test_stages_form_with_the_defaults(etcd: str, tmp_path: Path) -> None:
    requests = _requests(1)
    assert await asyncio.to_thread(_simulated_stages, requests) > 1
    profile = load_profile(PROFILE)
    engine: dict[str, object] = {
        "profile": PROFILE,
        "speed": SPEED,
        "max_model_len": 32_768,
        "kv_blocks": profile.kv_capacity_tokens // 16,
        "block_tokens": 16,
        "max_num_seqs": SEATS,
        "prediction_error": 0.0,
    }
    name = f"stages-{uuid.uuid4().hex[:8]}"
    async with open_fleet(etcd, name, tmp_path, INSTANCES, engine) as fleet:
        await fleet.set_policy("cascade")
        load = asyncio.create_task(_send(fleet, requests))
        try:
            async with asyncio.timeout(SECONDS + WAIT_S):
                await fleet.wait_for_members(lambda members: len(members.stages) > 1)
        finally:
            load.cancel()
            await asyncio.wait([load])
        assert tiles(fleet.members.stages, 131_072)
