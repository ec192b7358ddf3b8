"""Start a planned cluster and wait until it is ready; stop it again after an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from tailrace.address import parse_endpoints
from tailrace.local.certificates import ETCD_ROOT, OPERATOR, certificate_folder, transport_of
from tailrace.local.options import OwnCluster
from tailrace.local.plan import PartSpec, Plan, Tier, waits_for_worker
from tailrace.local.process import PartFailed, PartProcess, stop_parts
from tailrace.local.progress import Progress, Step
from tailrace.local.ready import active_instances, wait_ready
from tailrace.local.state import RunFolder, RunState
from tailrace.messages import objectives_message
from tailrace.security.roles import Role
from tailrace.security.transport import Transport
from tailrace.store.client import EtcdClient, Rejected, StoreUnavailable
from tailrace.store.etcd_roles import apply_rights, etcd_rights
from tailrace.v1.admin_pb2 import SetPolicyRequest, SetSloRequest, Slo
from tailrace.v1.admin_pb2_grpc import AdminStub

_POLL_S: Final = 0.1
_CALL_TIMEOUT_S: Final = 2.0
_SETTLE_TIMEOUT_S: Final = 30.0
_LIGHT_AT_ONCE: Final = 8
_ROOT: Final = (ETCD_ROOT.role.value, ETCD_ROOT.name)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is set in a cluster as soon as a scheduler leads it."""

    policy: SetPolicyRequest | None = None
    slo: Slo | None = None

    async def apply(self, admin: str, transport: Transport) -> None:
        """Set it by the admin API, retrying until a scheduler leads. Raise PartFailed if none accepts it in
        time. `admin`: HOST:PORT[,..]."""
        if self.policy is not None:
            what = f"the policy {self.policy.name!r}"
            await _set(admin, transport, what, lambda stub: stub.SetPolicy, self.policy)
        if self.slo is not None:
            request = SetSloRequest(slo=self.slo)
            await _set(admin, transport, "the SLO", lambda stub: stub.SetSlo, request)


def own_settings(own: OwnCluster) -> Settings:
    """Return what is set in a model's own cluster."""
    return Settings(
        SetPolicyRequest(name=own.policy, parameters=own.policy_parameters),
        objectives_message(own.objectives) if own.objectives else None,
    )


class Starter:
    """Start one cluster. The state file lists every process as soon as it is started."""

    def __init__(self, plan: Plan, folder: RunFolder, progress: Progress, cores: int) -> None:
        self._plan = plan
        self._folder = folder
        self._progress = progress
        # A heavy part keeps a core busy while it imports and loads.
        self._heavy = asyncio.Semaphore(max(1, cores))
        self._light = asyncio.Semaphore(_LIGHT_AT_ONCE)
        self._processes: list[PartProcess] = []
        self._failed = False
        self._transport = transport_of(plan.certificates, OPERATOR)
        self._may_set_rights = may_set_rights(plan.certificates)
        self._state = RunState(
            etcd=plan.etcd,
            certificates=plan.certificates,
            environment=dict(plan.environment),
            directory=str(Path.cwd()),
            workers=sum(len(spec.members) for spec in plan.tier(Tier.WORKER)),
            scaled=[*plan.scaled],
        )

    async def run(
        self,
        settings: Settings,
        model: str,
        own: Sequence[OwnCluster] = (),
        **facts: bool | str | list[str] | dict[str, str],
    ) -> RunState:
        """Start all parts, wait until they are ready, and return the state.

        `model`: the model name that clients use; `own`: the clusters of single models; `facts`: further
        fields of RunState. Raise PartFailed if a part exits or is not ready in time. After an error or
        cancellation, all started parts are stopped.
        """
        try:
            await self._watched(settings, own)
        except BaseException:
            self.stop()
            raise
        self._state.http = self._plan.http
        self._state.model = model
        self._state.policy = "" if settings.policy is None else settings.policy.name
        for name, value in facts.items():
            setattr(self._state, name, value)
        self._folder.write(self._state)
        return self._state

    def stop(self) -> None:
        """Stop all parts that this process has started; takes seconds."""
        stop_parts(self._state.parts, self._reap)
        self._folder.forget()

    def _reap(self) -> None:
        for process in self._processes:
            process.reap()

    async def _watched(self, settings: Settings, own: Sequence[OwnCluster]) -> None:
        """Start all parts; fail at once if any part exits meanwhile."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                await self._bring_up(settings, own)
                watch.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _watch(self) -> None:
        while True:
            for process in self._processes:
                process.check()
            await asyncio.sleep(_POLL_S)

    async def _bring_up(self, settings: Settings, own: Sequence[OwnCluster]) -> None:
        await self._start_all(self._plan.tier(Tier.ETCD))
        if self._may_set_rights:
            await set_rights(self._plan)
        await self._start_all(self._plan.tier(Tier.CONTROL))
        self._state.admin = self._plan.admin
        self._folder.write(self._state)
        await settings.apply(self._plan.admin, self._transport)
        for cluster in own:
            await own_settings(cluster).apply(self._plan.own[cluster.name], self._transport)
        # A model's first front end waits for the workers itself, so they can start together. The others share
        # its port, which is possible only once it is registered in the cluster.
        workers = [spec.name for spec in self._plan.tier(Tier.WORKER)]
        frontends = [
            spec
            for spec in self._plan.tier(Tier.FRONTEND)
            if not waits_for_worker(spec, self._plan.scaled, workers)
        ]
        first = {spec.http: spec for spec in reversed(frontends)}.values()
        await self._start_all([*self._plan.tier(Tier.WORKER), *first])
        await self._start_all([spec for spec in frontends if spec not in first])
        await self._start_all(self._plan.tier(Tier.EDGE))
        await self._see_workers()
        # No request needs the console: it starts while the user reads where it will be. What needs a worker
        # that the scaler starts is ready later, too.
        late = [spec for spec in self._plan.tier(Tier.FRONTEND) if spec not in frontends]
        for spec in (*late, *self._plan.tier(Tier.CONSOLE), *self._plan.tier(Tier.SCALER)):
            self._progress.show(spec.name, Step.STARTING)
            self._launch(spec)

    async def _start_all(self, specs: Sequence[PartSpec]) -> None:
        for spec in specs:
            self._progress.show(spec.name, Step.QUEUED)
        try:
            async with asyncio.TaskGroup() as group:
                for spec in specs:
                    group.create_task(self._start(spec))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _start(self, spec: PartSpec) -> None:
        async with self._heavy if spec.heavy else self._light:
            if self._failed:
                return  # whoever waited for its turn gets it before it is cancelled
            self._progress.show(spec.name, Step.STARTING)
            try:
                await wait_ready(self._launch(spec), self._progress, self._plan.certificates)
            except PartFailed:
                self._failed = True
                raise

    def _launch(self, spec: PartSpec) -> PartProcess:
        environment = {**self._plan.environment, **spec.environment}
        process = PartProcess(spec, self._folder.logs / f"{spec.name}.log", environment)
        self._processes.append(process)
        self._state.parts.append(process.part)
        self._folder.write(self._state)
        return process

    async def _see_workers(self) -> None:
        """Wait until the scheduler lists every worker, so that requests can be placed on any of them."""
        expected = {member for spec in self._plan.tier(Tier.WORKER) for member in spec.members}
        active: set[str] = set()
        try:
            async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                while not expected <= active:
                    admins = [self._plan.admin, *self._plan.own.values()]
                    active = set(await active_instances(admins, self._transport))
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            missing = ", ".join(sorted(expected - active))
            raise PartFailed(f"the scheduler does not see {missing}; logs: {self._folder.logs}") from None


def may_set_rights(certificates: str) -> bool:
    """Return whether etcd's root certificate is there: of a fleet on several hosts, one has it."""
    return bool(certificates) and Path(certificate_folder(certificates, *_ROOT)).exists()


async def set_rights(plan: Plan) -> None:
    """Grant each service its rights in etcd, and deny all other access. Raise PartFailed."""
    client = EtcdClient(parse_endpoints(plan.etcd.split(",")), transport_of(plan.certificates, ETCD_ROOT))
    try:
        for cluster in (plan.cluster, *plan.own):
            await apply_rights(client, etcd_rights(cluster), cluster)
    except (StoreUnavailable, Rejected) as error:
        raise PartFailed(f"etcd: setting up roles failed: {error}") from error
    finally:
        await client.close()


async def _set(
    admin: str, transport: Transport, what: str, method: Callable[[AdminStub], Any], request: object
) -> None:
    problem = ""
    try:
        async with asyncio.timeout(_SETTLE_TIMEOUT_S):
            while True:
                for address in admin.split(","):
                    async with transport.channel(address, Role.SCHEDULER, ()) as channel:
                        try:
                            await method(AdminStub(channel))(request, timeout=_CALL_TIMEOUT_S)
                            return
                        except grpc.aio.AioRpcError as error:
                            problem = error.details() or error.code().name
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise PartFailed(f"no scheduler accepted {what}: {problem}") from None
