"""The fleet under test: real vLLM workers with little KV, observed through its admin API and etcd."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from prometheus_client.parser import text_string_to_metric_families

from tailrace.cluster import Pool
from tailrace.store.membership import Membership
from tailrace.store.store import Store
from tailrace.v1 import admin_pb2, admin_pb2_grpc, profile_pb2
from tests.harness.controlled import POLL_S, ControlledFleet
from tests.harness.processes import FAST_FRONT
from tests.harness.servers import TailraceCluster
from tests.waiting import WAIT_S

WORKERS: Final = 3
BLOCK_TOKENS: Final = 32
# 3,040 tokens (vLLM reserves one block): exactly two of the longest requests, so that undisturbed answers can
# be recorded two at a time.
KV_BLOCKS: Final = 96
MAX_LEN: Final = 2_900

_PROFILE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Engines:
    """Configuration of the workers."""

    # The order of requests within an instance.
    intra: str = "policy"
    kv_blocks: int = KV_BLOCKS
    # Maximum tokens per step. None: vLLM's default.
    step_tokens: int | None = None
    # Maximum length of prompt and output.
    max_len: int = MAX_LEN
    workers: int = WORKERS
    # Seconds between two periodic reports. None: the workers' default.
    report_s: float | None = None

    def arguments(self) -> list[str]:
        """Return the arguments of `tailrace serve worker`."""
        arguments = ["--kv-blocks", str(self.kv_blocks), "--block-size", str(BLOCK_TOKENS)]
        arguments += ["--max-model-len", str(self.max_len), "--max-num-seqs", "32", "--intra", self.intra]
        if self.step_tokens is not None:
            arguments += ["--max-num-batched-tokens", str(self.step_tokens)]
        if self.report_s is not None:
            arguments += ["--report-interval", f"{self.report_s:g}"]
        return arguments


class Fleet(ControlledFleet):
    """A running cluster."""

    def __init__(self, url: str, admin: admin_pb2_grpc.AdminAsyncStub, members: Membership) -> None:
        super().__init__(admin)
        self.url = url
        self.members = members

    async def set_pools(self, pools: Mapping[str, Pool]) -> None:
        """Run `tailrace set pool` for each instance; those not named are removed from all pools."""
        for name in self.members.instances:
            await self.set_pool(name, pools.get(name))

    async def clear(self) -> None:
        """Reset the fleet: no pools, no stages, a policy without migrations; wait until it is idle."""
        # Not round robin, which may place three of six requests on one worker, which then preempts.
        await self.set_policy("least_loaded")
        await self.set_stages([])
        await self.set_pools({})
        async with asyncio.timeout(WAIT_S):
            while not await self._idle():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    async def _idle(self) -> bool:
        instances = (await self.instances()).values()
        return not any(i.running or i.waiting or i.kv_blocks_used for i in instances)

    async def profile(self) -> profile_pb2.MeasuredProfile:
        """Run `tailrace profile` on one instance; policies use the result for all instances."""
        request = admin_pb2.AdminProfileRequest(
            instance_id=min(self.members.instances), budget_s=_PROFILE_S, force=True
        )
        async for event in self.admin.Profile(request, timeout=_PROFILE_S + WAIT_S):
            if event.HasField("profile"):
                return event.profile
        raise RuntimeError("profiling ended without a profile")

    async def counters(self) -> Counts:
        """Return the workers' counters, summed over all workers."""
        addresses = [record.metrics_address for record in self.members.instances.values()]
        totals: dict[str, float] = {}
        for text in await asyncio.gather(*(asyncio.to_thread(_scrape, address) for address in addresses)):
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    key = sample.name + (f":{o}" if (o := sample.labels.get("outcome")) else "")
                    totals[key] = totals.get(key, 0.0) + sample.value
        return Counts(
            preemptions=int(totals.get("tailrace_worker_preemptions_total", 0)),
            swaps_out=int(totals.get("tailrace_worker_swaps_out_total", 0)),
            steps=int(totals.get("tailrace_worker_steps_total", 0)),
            tokens=int(totals.get("tailrace_worker_generated_tokens_total", 0)),
            offers_taken=int(totals.get("tailrace_worker_offers_total:taken", 0)),
            offers_kept=int(totals.get("tailrace_worker_offers_total:kept", 0)),
            pulled=int(totals.get("tailrace_worker_pulls_total:pulled", 0)),
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of all workers since they started. Offers are bid-ask's: taken by another worker, or kept.
    `pulled`: prefixes pulled from another worker."""

    preemptions: int
    swaps_out: int
    steps: int
    tokens: int
    offers_taken: int
    offers_kept: int
    pulled: int

    def since(self, before: Counts) -> Counts:
        """Return the increase since an earlier reading."""
        return Counts(*(getattr(self, name) - getattr(before, name) for name in self.__slots__))


@contextlib.asynccontextmanager
async def running_fleet(
    engines: Engines, front: str = FAST_FRONT, arguments: Sequence[str] = ()
) -> AsyncIterator[Fleet]:
    """Run a fleet for the block, which shows answers as they are made. `arguments`: further options of
    `tailrace up`."""
    arguments = ["--workers", str(engines.workers), "--policy", "least_loaded", "--no-traces", *arguments]
    arguments += ["--pace-tpot", "0"]
    arguments += engines.arguments()
    cluster = await asyncio.to_thread(TailraceCluster, "tailrace", arguments, front)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, cluster.__exit__, None, None, None)
        store = await Store.connect([cluster.etcd], "default")
        stack.push_async_callback(store.close)
        members = await Membership.start(store)
        stack.push_async_callback(members.close)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(cluster.admin.split(",")[0]))
        yield Fleet(cluster.url, admin_pb2_grpc.AdminStub(channel), members)


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as reply:
        return str(reply.read().decode())
