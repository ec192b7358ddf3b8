"""`tailrace set policy` under load, between all policies, without effect on answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random

import pytest

from tailrace.policy.registry import names
from tailrace.v1 import admin_pb2, types_pb2
from tests.live.fleet import Fleet
from tests.waiting import WAIT_S

PREFILL, DECODE = types_pb2.POOL_PREFILL, types_pb2.POOL_DECODE

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_one_policy_after_another_under_load(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    order = [*names(), "least_loaded+earliest_due", "cascade layout=chain"]
    random.Random(7).shuffle(order)
    lengths = itertools.cycle([(40, 0, 120), (200, 100, 60), (16, 30, 200), (400, 0, 40)])
    live: list[str] = []
    with caplog.at_level(logging.ERROR):
        for name in [*order, *reversed(order)]:
            await fleet.set_policy(name)
            live += [await fleet.send(*next(lengths)) for _ in range(3)]
            await fleet.wait_for_tokens(live[-1])
        await asyncio.gather(*(fleet.finish(request) for request in live))
    # Exceptions of a policy and invalid placements are logged as errors.
    assert not [
        r.getMessage()
        for r in caplog.records
        if r.name.startswith(("scheduler_svc", "tailrace.control", "frontend_svc"))
    ]
    assert len(live) == 6 * len(order)
    # After all switches, the configured policy decides.
    for name, pool in zip(fleet.names, [PREFILL, PREFILL, DECODE, DECODE], strict=True):
        await fleet.set_pool(name, pool)
    await fleet.wait_for_members(lambda m: len(m.pools) == len(fleet.names))
    for name in ("static_pools", "arrow"):
        await fleet.set_policy(name)
        request = await fleet.send(40, 0, 600)
        await fleet.wait_for_migration_by(name)
        await fleet.finish(request)


async def test_workers_apply_the_parameters_of_their_batch_order(fleet: Fleet) -> None:
    # Another policy's order, with its parameters.
    await fleet.set_policy("least_loaded+pascal", demotion_tokens="200")
    request = await fleet.send(60, 1_200, 10)

    async def demoted() -> bool:
        reply = await fleet.admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=WAIT_S)
        return any(info.demoted for info in reply.requests)

    async with asyncio.timeout(WAIT_S):
        while not await demoted():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        # The request still reasons, and is no longer demoted.
        await fleet.set_policy("pascal", demotion_tokens="10000")
        while await demoted():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await fleet.finish(request)
