"""A complete fleet with one process of simulated workers, real control services and a real front end.

The services and the front end run in the test's event loop; only the API server is a fake, which checks
that no output follows a request's last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc
import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from frontend_svc.engine import FleetEngine
from frontend_svc.settings import Settings as FrontSettings
from migration_svc import main as migration_main
from migration_svc.migration import CopyRules
from migration_svc.slots import MigrationSlots
from monitor_svc import main as monitor_main
from scheduler_svc import main as scheduler_main
from tailrace.records import PolicyRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.options import CommonOptions
from tailrace.service.runtime import Shutdown
from tailrace.service.vllm_line import VllmLine
from tailrace.store.membership import Membership
from tailrace.store.store import Store
from tailrace.v1 import admin_pb2, migration_pb2, types_pb2
from tailrace.v1.admin_pb2_grpc import AdminStub
from tailrace.wire.requests import SamplingParams
from tests.frontend.fake_api_server import FakeApiServer
from tests.harness.controlled import in_effect
from tests.harness.tries import RequestEnded, is_refused_for_now
from tests.waiting import WAIT_S
from tests.worker.worker_processes import WorkerProcess, worker_process
from worker_agent.engine.simulated import SimulatedSettings
from worker_agent.engine.simulated.script import Script, read_vocabulary

if TYPE_CHECKING:
    from tailrace.v1.admin_pb2_grpc import AdminAsyncStub

COMMITTED = types_pb2.MIGRATION_STATE_COMMITTED
Reply = TypeVar("Reply")


@dataclass
class Fleet:
    """A fleet with the workers `names`. Answers are compared with undisturbed ones of the simulated model."""

    store: Store
    members: Membership
    channels: Channels
    front: FakeApiServer
    engine: FleetEngine
    process: WorkerProcess
    settings: SimulatedSettings
    names: list[str]
    registry: CollectorRegistry
    _prompts: dict[str, tuple[list[int], SamplingParams]] = field(default_factory=dict)
    _sent: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def admin(self) -> AdminAsyncStub:
        """Return the admin API of the scheduler, which leads unless its machine is too busy."""
        (address,) = {s.address for (kind, _), s in self.members.services.items() if kind == "scheduler"}
        return AdminStub(self.channels.get(address, Role.SCHEDULER))

    async def call(self, make: Callable[[AdminAsyncStub], Awaitable[Reply]]) -> Reply:
        """Return what a call of the admin API returns; make it again as long as it is refused for now."""
        async with asyncio.timeout(WAIT_S):
            while True:
                # It registers again if its lease has expired.
                await self.wait_for_members(lambda m: any(kind == "scheduler" for kind, _ in m.services))
                try:
                    return await make(self.admin)
                except grpc.aio.AioRpcError as refused:
                    if not is_refused_for_now(refused):
                        raise
                await asyncio.sleep(0.1)

    # ---- requests

    async def send(self, prompt_tokens: int, reasoning: int, answer: int, prefix: Sequence[int] = ()) -> str:
        """Send a request of exactly these lengths, plus the tags around its reasoning; return its ID.

        Its prompt is `prefix`, followed by `prompt_tokens` tokens of its own.
        """
        self._sent += 1
        request_id = f"q{self._sent}"
        prompt = [ord(letter) for letter in f"{request_id} "] + [32 + self._sent % 64] * prompt_tokens
        prompt = [*prefix, *prompt[:prompt_tokens]]
        total = reasoning + answer + 2
        extra = {"reasoning_tokens": reasoning, "answer_tokens": answer}
        await self.front.add(request_id, prompt, total, extra_args=extra)
        self._prompts[request_id] = prompt, self.front.sampling(total, extra)
        return request_id

    async def finish(self, *request_ids: str) -> None:
        """Wait for the end of each request; assert that it has every token once and in order."""
        for request_id in request_ids:
            await self.front.end_of(request_id)
            prompt, sampling = self._prompts.pop(request_id)
            vocabulary = read_vocabulary(self.settings.tokenizer, "<think>", "</think>")
            script = Script(prompt, sampling, self.settings, vocabulary)
            wanted = [script.token(index) for index in range(sampling.max_tokens or 0)]
            assert self.front.tokens[request_id] == wanted, f"{request_id} is not what it would have been"

    async def wait_for_tokens(self, request_id: str, tokens: int = 1) -> None:
        """Wait until the request has this many tokens."""
        await self.front.tokens_of(request_id, tokens)

    # ---- the cluster

    async def set_policy(self, name: str, **parameters: str) -> None:
        """Set the policy like `tailrace set policy`, and wait until it is active."""
        request = admin_pb2.SetPolicyRequest(name=name, parameters=parameters)
        await self.call(lambda admin: admin.SetPolicy(request, timeout=WAIT_S))
        async with asyncio.timeout(WAIT_S):
            while not in_effect(await self._policies(), name, parameters):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _policies(self) -> Sequence[admin_pb2.PolicyInfo]:
        request = admin_pb2.ListPoliciesRequest()
        reply = await self.call(lambda admin: admin.ListPolicies(request, timeout=WAIT_S))
        return reply.policies

    async def set_stages(self, *stages: types_pb2.Stage) -> None:
        """Set the stages like `tailrace set stages`."""
        request = admin_pb2.SetStagesRequest(stages=stages)
        await self.call(lambda admin: admin.SetStages(request, timeout=WAIT_S))

    async def set_pool(self, name: str, pool: types_pb2.Pool.ValueType) -> None:
        """Set a pool like `tailrace set pool`."""
        request = admin_pb2.SetPoolRequest(instance_id=name, pool=pool)
        await self.call(lambda admin: admin.SetPool(request, timeout=WAIT_S))

    async def clear_pools_and_stages(self) -> None:
        """Remove all pools and stages."""
        await self.set_stages()
        for name in self.names:
            await self.set_pool(name, types_pb2.POOL_UNSPECIFIED)

    async def wait_for_members(
        self, wanted: Callable[[Membership], bool], requests: Sequence[str] = ()
    ) -> None:
        """Wait until the membership in etcd satisfies `wanted`. Raise RequestEnded if all these requests have
        ended before."""
        async with asyncio.timeout(WAIT_S):
            while not wanted(self.members):
                if requests and not self.running(*requests):
                    raise RequestEnded("the membership has not become what they were to make it")
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.2)

    async def instances(self) -> dict[str, admin_pb2.InstanceInfo]:
        """Return the instances like `tailrace get instances`."""
        request = admin_pb2.ListInstancesRequest()
        reply = await self.call(lambda admin: admin.ListInstances(request, timeout=WAIT_S))
        return {info.instance_id: info for info in reply.instances}

    async def read_metric(self, metric: str, **labels: str) -> float:
        """Return a metric from /metrics of the worker process, or 0 if it is absent."""

        def read() -> str:
            url = f"http://{self.process.records[0].metrics_address}/metrics"
            with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
                return str(reply.read().decode())

        for family in text_string_to_metric_families(await asyncio.to_thread(read)):
            for sample in family.samples:
                if sample.name == metric and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return 0.0

    async def wait_for_metric(self, least: float, metric: str, **labels: str) -> None:
        """Wait until the metric is at least `least`: it can lag behind its effects."""
        async with asyncio.timeout(WAIT_S):
            while await self.read_metric(metric, **labels) < least:  # noqa: ASYNC110 - metrics have no notification
                await asyncio.sleep(0.05)

    def placed_by_front_end(self) -> float:
        """Return how many requests the front end has placed itself, since the scheduler answered too late."""
        name = "tailrace_frontend_placements_total"
        return self.registry.get_sample_value(name, {"by": "fallback"}) or 0.0

    async def owners(self) -> dict[str, str]:
        """Return the owner of each request, as known to the front end."""
        return {s.request_id: s.owner or "" for s in self.engine.table}

    def running(self, *requests: str) -> list[str]:
        """Return those of these requests whose last output has not arrived."""
        return [request for request in requests if request not in self.front.ends]

    async def migrations(self, reason: str = "") -> list[migration_pb2.MigrationRecord]:
        """Return the committed migrations (with this reason), latest first."""
        request = migration_pb2.ListMigrationsRequest(limit=1_000)
        reply = await self.call(lambda admin: admin.ListMigrations(request, timeout=WAIT_S))
        return [m for m in reply.migrations if m.state == COMMITTED and (not reason or m.reason == reason)]

    async def wait_for_migrations(
        self, reason: str, requests: Sequence[str], count: int = 1
    ) -> list[migration_pb2.MigrationRecord]:
        """Wait until `count` migrations of these requests with this reason were committed. Raise RequestEnded
        if all of them have ended before."""
        async with asyncio.timeout(WAIT_S):
            while True:
                over = not self.running(*requests)
                found = [m for m in await self.migrations(reason) if m.request_id in requests]
                if len(found) >= count:
                    return found
                if over:
                    raise RequestEnded(f"{len(found)} of {count} migrations: {reason}")
                # The service sends no notification of its history.
                await asyncio.sleep(0.05)

    async def wait_for_migration_by(self, policy: str, request: str) -> None:
        """Wait until a migration of the request that this policy decided was committed. Raise RequestEnded if
        it has ended before."""
        async with asyncio.timeout(WAIT_S):
            while True:
                over = not self.running(request)
                if policy in {m.policy for m in await self.migrations() if m.request_id == request}:
                    return
                if over:
                    raise RequestEnded(f"no migration by {policy}")
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def open_fleet(
    etcd: str, cluster: str, folder: Path, count: int, engine: Mapping[str, object]
) -> AsyncIterator[Fleet]:
    """Start `count` workers w-0, w-1, ... with these engine settings, and all services."""
    async with contextlib.AsyncExitStack() as stack:
        store = await Store.connect([etcd], cluster)
        stack.push_async_callback(store.close)
        members = await Membership.start(store)
        stack.push_async_callback(members.close)
        channels = Channels()
        stack.push_async_callback(channels.close)

        def options(kind: str) -> CommonOptions:
            return CommonOptions((etcd,), cluster, "127.0.0.1:0", "127.0.0.1:0", kind, "")

        # The services are cancelled at the end, not drained.
        no_drain = Shutdown()
        for kind, serving in (
            ("monitor", monitor_main.serve(options("monitor"), 2.0, 100_000, no_drain)),
            (
                "migration",
                migration_main.serve(options("migration"), None, MigrationSlots(), CopyRules(), Shutdown()),
            ),
            (
                "scheduler",
                scheduler_main.serve(options("scheduler"), PolicyRecord(name="round_robin"), no_drain),
            ),
        ):
            stack.push_async_callback(_stop, asyncio.create_task(serving, name=kind))
        process = await stack.enter_async_context(
            worker_process(
                store, etcd, cluster, folder, "w-0", count=count, engine=engine, more=("--intra", "policy")
            )
        )
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-")))
        front = await stack.enter_async_context(FakeApiServer(sockets))
        registry = CollectorRegistry()
        core = FleetEngine(
            # No pace under any policy: tests wait for whole answers.
            FrontSettings(
                frontend_id="f0", line=VllmLine(flags={"reasoning_parser": ("tiny",)}), pace_tpot_ms=0.0
            ),
            members,
            channels,
            sockets,
            registry,
            None,
        )
        stack.push_async_callback(_stop, asyncio.create_task(core.run(), name="front end"))
        await front.ready()
        front.wait_s = WAIT_S
        names = [record.instance_id for record in process.records]
        settings = msgspec.convert(dict(engine), SimulatedSettings)
        fleet = Fleet(store, members, channels, front, core, process, settings, names, registry)
        members.add_listener(fleet._changed.set)
        await fleet.wait_for_members(
            lambda m: (
                {"scheduler", "monitor", "migration"} <= m.leaders.keys() and set(names) <= m.instances.keys()
            )
        )
        async with asyncio.timeout(WAIT_S):
            while set(core.workers.attached()) != set(names) or not all(  # noqa: ASYNC110
                info.report_age_s < 2.0 for info in (await fleet.instances()).values()
            ):
                await asyncio.sleep(0.02)
        yield fleet


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
