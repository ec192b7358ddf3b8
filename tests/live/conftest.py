"""One fleet of simulated workers for all tests of a module."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.live.fleet import Fleet, open_fleet

# The KV is small, so that a dozen requests are a load. A step takes about 7 ms: requests run for seconds, so
# the control plane sees them in time, also on a busy machine.
ENGINE: dict[str, object] = {
    "speed": 1.0,
    "max_model_len": 4096,
    "kv_blocks": 256,
    "block_tokens": 16,
    "kv_bytes_per_token": 256,
    "max_num_seqs": 64,
    "prediction_error": 0.0,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_fleet(etcd: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Start a fleet with four workers."""
    folder = tmp_path_factory.mktemp("live")
    async with open_fleet(etcd, f"live-{uuid.uuid4().hex[:8]}", folder, 4, ENGINE) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(shared_fleet: Fleet) -> Fleet:
    """Return the shared fleet without pools and stages, under round robin."""
    await shared_fleet.set_policy("round_robin")
    await shared_fleet.clear_pools_and_stages()
    return shared_fleet
