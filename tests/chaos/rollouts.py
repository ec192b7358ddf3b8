"""Roll out one of two model versions, with the command that an operator types."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Final

import grpc

from tailrace.cli.errors import Unreachable
from tailrace.v1 import admin_pb2
from tests.chaos.cluster import MODEL, Cluster
from tests.chaos.load import Load
from tests.chaos.schedule import Tier, Version
from tests.chaos.timeline import Timeline

_CALL_S: Final = 5.0
# Longer than concurrent faults of workers, front ends and schedulers.
_PREPARE_S: Final = 150
_ROLLOUT_S: Final = 240
_COMMAND_S: Final = 300.0
_RETRY_S: Final = 0.5


class Rollouts:
    """Rollouts of the cluster's model, which begins with the first version."""

    def __init__(self, cluster: Cluster, load: Load, timeline: Timeline) -> None:
        self._cluster = cluster
        self._load = load
        self._timeline = timeline
        self._fingerprints: dict[Version, str] = {}
        self._current = Version.FIRST

    async def read_fingerprints(self) -> None:
        """Read the fingerprint of each version. Raise TimeoutError if no scheduler replies in time."""
        model = await self._model()
        workers = self._cluster.in_tier(Tier.WORKER)
        versions = {name: member.version for member in workers for name in member.spec.members}
        self._fingerprints = {versions[each.instance_ids[0]]: each.fingerprint for each in model.versions}

    async def swap(self) -> None:
        """Roll out the other version; return when done. Raise RuntimeError or TimeoutError if that fails."""
        other = self._other
        self._load.set_versions([*Version])
        await self._start(other)
        self._current = other
        self._load.set_versions([other])

    async def swap_and_undo(self, after_s: float) -> None:
        """Roll out the other version, and undo that so many seconds after its start, done or not. Raise
        RuntimeError or TimeoutError if that fails."""
        self._load.set_versions([*Version])
        before_s = (await self._model()).rollout.begun_s
        starting = asyncio.create_task(self._start(self._other))
        try:
            async with asyncio.timeout(_COMMAND_S):
                while not starting.done() and (await self._model()).rollout.begun_s == before_s:
                    await asyncio.wait([starting], timeout=_RETRY_S)
            await asyncio.sleep(after_s)
            if starting.done():
                starting.result()
            await self._retry_command("undo", MODEL)
        finally:
            # The command fails if the rollout that it waits for is undone.
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        self._load.set_versions([self._current])

    async def _model(self) -> admin_pb2.ModelInfo:
        """Return the model as a scheduler reports it; retry until one replies."""
        async with asyncio.timeout(_COMMAND_S):
            while True:
                for scheduler in self._cluster.in_tier(Tier.SCHEDULER):
                    channel, stub = self._cluster.admin_stub(scheduler)
                    async with channel:
                        with contextlib.suppress(grpc.aio.AioRpcError):
                            reply = await stub.ListModels(admin_pb2.ListModelsRequest(), timeout=_CALL_S)
                            if found := [each for each in reply.models if each.name == MODEL]:
                                return found[0]
                await asyncio.sleep(_RETRY_S)

    @property
    def _other(self) -> Version:
        return Version.CHANGED if self._current is Version.FIRST else Version.FIRST

    async def _start(self, version: Version) -> None:
        # Fewer than exist: some may be down.
        await self._retry_command("start", MODEL, "--to", self._fingerprints[version], "--min-warm", "2")

    async def _retry_command(self, *arguments: str) -> None:
        """Run the command, again as long as no scheduler replies."""
        until_s = time.monotonic() + _COMMAND_S
        while True:
            code, lines = await self._run_command(*arguments)
            if not code:
                self._timeline.note(lines[-1])
                return
            if code != Unreachable.exit_code or time.monotonic() > until_s:
                raise RuntimeError(f"tailrace rollout {arguments[0]}: exit {code}: {' / '.join(lines)}")
            await asyncio.sleep(_RETRY_S)

    async def _run_command(self, *arguments: str) -> tuple[int, list[str]]:
        """Return the exit status and output lines of `tailrace rollout ARGUMENTS`."""
        admin = ",".join(each.spec.address for each in self._cluster.in_tier(Tier.SCHEDULER) if each.healthy)
        command = [sys.executable, "-m", "tailrace", "rollout", *arguments]
        command += ["--prepare-timeout", str(_PREPARE_S), "--timeout", str(_ROLLOUT_S)]
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
