"""Hear from front ends whether they take requests, and how many tokens tenants have used of those with vLLM's
Rust API server: an edge refuses for them, since vllm-rs answers every refusal with 500."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final

import grpc
from prometheus_client import CollectorRegistry, Gauge

from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded, format_error
from tailrace.service.tasks import cancel, supervise
from tailrace.tenancy.body import LimitRefusal
from tailrace.v1 import usage_pb2, usage_pb2_grpc

log = logging.getLogger(__name__)

_AGAIN_S: Final = 0.5
# Front ends that are remembered, in the order of their last reports.
_RUNS_MAX: Final = 1_000
_STATUSES: Final = frozenset(map(int, HTTPStatus))
# When it is worth trying again.
_LATER_S: Final = 2


class Usage:
    """The last reports of the front ends of an edge's models."""

    def __init__(
        self,
        channels: Channels,
        charge: Callable[[str, int], None],
        registry: CollectorRegistry,
        with_keys: bool,
    ) -> None:
        """`charge(tenant, tokens)` is called for what tenants have used since the report before."""
        self._channels = channels
        self._with_keys = with_keys
        self._charge = charge
        self._front_ends: Mapping[str, Iterable[str]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, usage_pb2.UsageReport] = {}
        # What was charged by run of a front end, also while nothing is heard of it.
        self._charged: dict[str, Mapping[str, int]] = {}
        unheard = Gauge(
            "tailrace_edge_unheard_front_ends",
            "Front ends that do not report now what tenants have used, and whether they take requests.",
            registry=registry,
        )
        unheard.set_function(lambda: float(len(self._tasks.keys() - self._reports.keys())))

    def follow(self, front_ends: Mapping[str, Iterable[str]]) -> None:
        """Listen to these from now on: gRPC addresses by cluster of Envoy's."""
        self._front_ends = front_ends
        wanted = {address for addresses in front_ends.values() for address in addresses}
        for address in self._tasks.keys() - wanted:
            self._tasks.pop(address).cancel()
            self._reports.pop(address, None)
        for address in wanted - self._tasks.keys():
            self._tasks[address] = supervise("usage", partial(self._listen, address), address)

    async def close(self) -> None:
        """Listen to nobody any more."""
        tasks, self._tasks = [*self._tasks.values()], {}
        await cancel(*tasks)

    def check(self, cluster: str, tenant: str) -> None:
        """Refuse a request if every front end of the cluster would. Raise LimitRefusal."""
        reports = [self._reports.get(address) for address in self._front_ends.get(cluster, ())]
        if not reports or None in reports:
            return
        known = [report for report in reports if report is not None]
        if all(report.refusal_status for report in known):
            first = known[0]
            raise LimitRefusal(HTTPStatus(first.refusal_status), first.refusal_message, _LATER_S)
        if all(report.refusal_status or tenant in report.full_tenants for report in known):
            message = "Too many requests of this key's tenant are queued; try again later."
            raise LimitRefusal(HTTPStatus.TOO_MANY_REQUESTS, message, _LATER_S)

    def unready(self) -> str:
        """Return why a load balancer should send requests elsewhere; empty unless every front end says so."""
        reports = [self._reports.get(address) for address in sorted(self._tasks)]
        reasons = ["" if report is None else report.unready for report in reports]
        return reasons[0] if reasons and all(reasons) else ""

    def context_tokens(self, cluster: str) -> int:
        """Return the shortest context of the cluster's front ends; 0 if none has said it."""
        reports = [self._reports.get(address) for address in self._front_ends.get(cluster, ())]
        return min((each.context_tokens for each in reports if each and each.context_tokens), default=0)

    async def _listen(self, address: str) -> None:
        problem = ""
        while True:
            try:
                stub = usage_pb2_grpc.UsageStub(self._channels.get(address, Role.FRONTEND))
                async for report in stub.Watch(usage_pb2.WatchUsageRequest()):
                    problem = ""
                    self._heard(address, decoded(report, address))
            except grpc.aio.AioRpcError as error:
                if not problem:
                    problem = format_error(error)
                    log.warning("front end at %s does not report: %s", address, problem)
            self._reports.pop(address, None)
            await asyncio.sleep(_AGAIN_S)

    def _heard(self, address: str, report: usage_pb2.UsageReport) -> None:
        tokens = dict(report.tokens)
        # What was used before this edge listened is not charged.
        charged = self._charged.pop(report.run, tokens)
        for tenant, count in tokens.items():
            if count > (before := charged.get(tenant, 0)):
                self._charge(tenant, count - before)
        self._charged[report.run] = tokens
        if len(self._charged) > _RUNS_MAX:
            del self._charged[next(iter(self._charged))]
        if self._with_keys and not report.knows_tenants and address not in self._reports:
            log.warning("front end at %s has no --api-keys: no tokens are counted, no caches salted", address)
        if report.refusal_status and report.refusal_status not in _STATUSES:
            report.refusal_status = HTTPStatus.SERVICE_UNAVAILABLE
        self._reports[address] = report
