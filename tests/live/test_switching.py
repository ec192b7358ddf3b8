"""`tailrace set policy` under load, between all policies, without effect on answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random

import pytest

from tailrace.policy.registry import names
from tailrace.v1 import admin_pb2, types_pb2
from tests.harness.tries import RequestEnded, before_they_end
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
        await before_they_end(lambda: _moved_by(fleet, name))  # noqa: B023


async def _moved_by(fleet: Fleet, policy: str) -> None:
    request = await fleet.send(40, 0, 600)
    try:
        await fleet.wait_for_migration_by(policy, request)
    finally:
        await fleet.finish(request)


async def test_workers_apply_the_parameters_of_their_batch_order(fleet: Fleet) -> None:
    await before_they_end(lambda: _demoted_and_not(fleet))


async def _demoted_and_not(fleet: Fleet) -> None:
    """Raise RequestEnded if the request has ended before it was seen to be demoted, and then not to be."""
    # Another policy's order, with its parameters.
    await fleet.set_policy("least_loaded+pascal", demotion_tokens="200")
    request = await fleet.send(60, 1_200, 10)
    listing = admin_pb2.ListRequestsRequest()

    async def wait_until_demoted(wanted: bool) -> None:
        while True:
            over = not fleet.running(request)
            reply = await fleet.call(lambda admin: admin.ListRequests(listing, timeout=WAIT_S))
            if over:
                raise RequestEnded(f"it was not seen to be demoted: {wanted}")
            if reply.requests and any(info.demoted for info in reply.requests) is wanted:
                return
            await asyncio.sleep(0.02)

    try:
        async with asyncio.timeout(WAIT_S):
            await wait_until_demoted(True)
            # The request still reasons, and is no longer demoted.
            await fleet.set_policy("pascal", demotion_tokens="10000")
            await wait_until_demoted(False)
    finally:
        await fleet.finish(request)
