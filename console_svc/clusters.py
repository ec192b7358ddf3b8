"""The console's cluster and those that belong to it, CLUSTER.NAME: a fleet each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import grpc

from console_svc.fleet import WatchedFleet
from tailrace.bounded import shown
from tailrace.cli.admin import CALL_TIMEOUT_S, AdminAddress, admin_address
from tailrace.cli.errors import CliError
from tailrace.cli.plain import JsonValue
from tailrace.service.channels import decoded
from tailrace.service.tasks import cancel, supervise, supervised
from tailrace.v1.admin_pb2 import ClusterInfo, ListServicesRequest

log = logging.getLogger(__name__)

VIEWERS_MAX: Final = 32
"""Most pages that follow a fleet at once."""
_CLUSTERS_MAX: Final = 100
_INTERVAL_S: Final = 5.0


class TooManyViewers(Exception):
    """No further page can follow a fleet."""


class UnknownCluster(Exception):
    """There is no such cluster; the message names those that there are."""


class Clusters:
    """All fleets that the console shows. They are followed while somebody watches one of them."""

    def __init__(self, address: AdminAddress) -> None:
        self._address = address
        # Until its scheduler has told it, the own cluster has no name.
        self._own_name = ""
        self._own = WatchedFleet(address, self._session)
        self._below: dict[str, WatchedFleet] = {}
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._listed: Sequence[JsonValue] = ()
        self._asking = asyncio.Lock()
        self._viewers = 0
        self._watched = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow clusters and fleets during the block, while they are watched; then close the connections."""
        try:
            async with supervised({"poll": self._own.poll, "clusters": self._follow}):
                yield
        finally:
            for name in [*self._below]:
                await self._remove(name)
            await self._own.close()

    async def fleet(self, name: str) -> WatchedFleet:
        """Return the fleet of a cluster; empty: of the own. Raise UnknownCluster."""
        if name in ("", self._own_name):
            return self._own
        if name not in self._below:
            await self._ask()
        if name == self._own_name:
            return self._own
        if name not in self._below:
            known = ", ".join(filter(None, (self._own_name, *self._below))) or "none"
            raise UnknownCluster(f"cluster: there is no {shown(name)}; there are: {known}")
        return self._below[name]

    @asynccontextmanager
    async def watched(self, name: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Poll a cluster's fleet during the block; yield the snapshots, of which a slow viewer misses some,
        until the cluster is gone.

        Raise TooManyViewers or UnknownCluster.
        """
        if self._viewers >= VIEWERS_MAX:
            raise TooManyViewers(f"{VIEWERS_MAX} pages follow the fleet already")
        self._viewers += 1
        self._watched.set()
        try:
            async with (await self.fleet(name)).watched() as snapshots:
                yield snapshots
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._watched.clear()

    async def _follow(self) -> None:
        while True:
            await self._watched.wait()
            await self._ask()
            await asyncio.sleep(_INTERVAL_S)

    async def _ask(self) -> None:
        """Ask which clusters there are; without an answer, those that are known stay."""
        async with self._asking:
            await self._ask_alone()

    async def _ask_alone(self) -> None:
        try:
            reply = await self._own.stub.ListServices(ListServicesRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # The own fleet's snapshots say so.
            log.debug("no list of clusters: %s", error.details())
            return
        clusters = decoded(reply, self._address.text).clusters[: 1 + _CLUSTERS_MAX]
        if clusters:
            self._own_name = clusters[0].name
            await self._apply(clusters[1:])
        self._listed = [
            {"name": info.name, "models": list(info.models)}
            for number, info in enumerate(clusters)
            if not number or info.name in self._below
        ]

    async def _apply(self, infos: Sequence[ClusterInfo]) -> None:
        for name in self._below.keys() - {info.name for info in infos}:
            await self._remove(name)
        for info in infos:
            # While its schedulers are away, it is where it was.
            if not info.admin_addresses:
                continue
            text = ",".join(info.admin_addresses)
            try:
                # It looks names up.
                address = await asyncio.to_thread(admin_address, text, self._address.transport)
            except CliError as error:
                log.warning("cluster %s: %s", info.name, error)
                continue
            if (fleet := self._below.get(info.name)) is not None:
                fleet.move(address)
                continue
            fleet = self._below[info.name] = WatchedFleet(address, self._session)
            self._polls[info.name] = supervise("poll", fleet.poll, info.name)

    async def _remove(self, name: str) -> None:
        fleet = self._below.pop(name)
        await cancel(self._polls.pop(name))
        await fleet.close()

    def _session(self, fleet: WatchedFleet) -> dict[str, JsonValue]:
        """Return what a page is told of itself."""
        name = next((name for name, other in self._below.items() if other is fleet), self._own_name)
        return {
            "admin": fleet.address,
            "who": fleet.who,
            "may_act": fleet.may_act,
            "cluster": name,
            "own": fleet is self._own,
            "clusters": list(self._listed),
        }
