"""Rollouts between two versions of the model, by the command that an operator types."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Final

import grpc

from benchmarks.chaos.cluster import MODEL, Cluster
from benchmarks.chaos.load import Load
from benchmarks.chaos.schedule import Tier, Version
from benchmarks.chaos.timeline import Timeline
from tailrace.v1 import admin_pb2

_CALL_S: Final = 5.0
# Longer than what is done meanwhile to workers, front ends and schedulers.
_PREPARE_S: Final = 150
_OVER_S: Final = 240
_COMMAND_S: Final = 300.0
_AGAIN_S: Final = 0.5
# Exit status of a command that no scheduler has answered.
_UNREACHABLE: Final = 3


class Rollouts:
    """Of the cluster's model. Begins with the first version."""

    def __init__(self, cluster: Cluster, load: Load, timeline: Timeline) -> None:
        self._cluster = cluster
        self._load = load
        self._timeline = timeline
        self._fingerprints: dict[Version, str] = {}
        self._now = Version.FIRST

    async def learn(self) -> None:
        """What each version is called. Raises TimeoutError."""
        model = await self._model()
        workers = self._cluster.of(Tier.WORKER)
        runs = {name: member.version for member in workers for name in member.spec.members}
        self._fingerprints = {runs[each.instance_ids[0]]: each.fingerprint for each in model.versions}

    async def swap(self) -> None:
        """To the other version, until it is done. Raises RuntimeError, TimeoutError."""
        other = self._other
        self._load.made_by([*Version])
        await self._start(other)
        self._now = other
        self._load.made_by([other])

    async def swap_and_undo(self, after_s: float) -> None:
        """Taken back so long after its begin, whether it is done by then or not. Raises RuntimeError,
        TimeoutError."""
        self._load.made_by([*Version])
        before_s = (await self._model()).rollout.begun_s
        starting = asyncio.create_task(self._start(self._other))
        try:
            async with asyncio.timeout(_COMMAND_S):
                while not starting.done() and (await self._model()).rollout.begun_s == before_s:
                    await asyncio.wait([starting], timeout=_AGAIN_S)
            await asyncio.sleep(after_s)
            if starting.done():
                starting.result()
            await self._command("undo", MODEL)
        finally:
            # It fails where the rollout that it waits for is taken back.
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        self._load.made_by([self._now])

    async def _model(self) -> admin_pb2.ModelInfo:
        """As a scheduler knows it; asks until one answers."""
        async with asyncio.timeout(_COMMAND_S):
            while True:
                for scheduler in self._cluster.of(Tier.SCHEDULER):
                    channel, stub = self._cluster.admin_stub(scheduler)
                    async with channel:
                        with contextlib.suppress(grpc.aio.AioRpcError):
                            reply = await stub.ListModels(admin_pb2.ListModelsRequest(), timeout=_CALL_S)
                            if found := [each for each in reply.models if each.name == MODEL]:
                                return found[0]
                await asyncio.sleep(_AGAIN_S)

    @property
    def _other(self) -> Version:
        return Version.CHANGED if self._now is Version.FIRST else Version.FIRST

    async def _start(self, version: Version) -> None:
        # Fewer than there are: some may be down.
        await self._command("start", MODEL, "--to", self._fingerprints[version], "--min-warm", "2")

    async def _command(self, *arguments: str) -> None:
        """Again, as long as no scheduler answers."""
        until_s = time.monotonic() + _COMMAND_S
        while True:
            code, said = await self._typed(*arguments)
            if not code:
                self._timeline.note(said[-1])
                return
            if code != _UNREACHABLE or time.monotonic() > until_s:
                raise RuntimeError(f"tailrace rollout {arguments[0]}: exit {code}: {' / '.join(said)}")
            await asyncio.sleep(_AGAIN_S)

    async def _typed(self, *arguments: str) -> tuple[int, list[str]]:
        """Exit status and lines of `tailrace rollout ARGUMENTS`."""
        admin = ",".join(each.spec.address for each in self._cluster.of(Tier.SCHEDULER) if each.well)
        command = [sys.executable, "-m", "tailrace", "rollout", *arguments]
        command += ["--prepare-timeout", str(_PREPARE_S), "--timeout", str(_OVER_S)]
        command += ["--admin", admin or self._cluster.admin, "--tls", self._cluster.operator_folder]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(_COMMAND_S):
                out, _ = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return process.returncode or 0, out.decode().splitlines() or [""]
