"""Restart parts of a local cluster, one at a time, as an operator does in a rolling restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tailrace.local.certificates import OPERATOR, transport_of
from tailrace.local.plan import PartSpec, Tier, waits_for_worker
from tailrace.local.process import PartFailed, PartProcess, stop_part
from tailrace.local.progress import Progress, Step
from tailrace.local.ready import active_instances, wait_ready
from tailrace.local.state import Part, RunFolder, RunFolderUnusable, RunState

DRAIN_S: Final = 330.0
"""Time for a part to drain, in seconds: longer than the default drain timeout of any part."""
_POLL_S: Final = 0.1
_SETTLE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Restarted:
    """Durations of a restart in seconds: from SIGTERM to the exit, and from the start until the cluster uses
    the part."""

    stopping_s: float
    starting_s: float


class Restarter:
    """Restart parts of a cluster; the caller holds the lock of its run folder."""

    def __init__(
        self,
        folder: RunFolder,
        state: RunState,
        progress: Progress,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: of all parts that are started, if it is not the state's."""
        self._folder = folder
        self._state = state
        self._progress = progress
        self._environment = state.environment if environment is None else environment
        # Children of this process, which it must reap.
        self._processes: list[PartProcess] = []
        self._transport = transport_of(state.certificates, OPERATOR)

    async def restart(
        self, name: str, drain_s: float = DRAIN_S, changed: PartSpec | None = None
    ) -> Restarted:
        """Stop a part if it is running, and start it again, as changed; return once the cluster uses it.

        If this is cancelled, it is done to its end first, so that the part is not left down. Raise KeyError
        for an unknown part, PartFailed if it does not start; it is down then. Raise RunFolderUnusable if the
        state cannot be written, as on a full disk; the part goes on then, or is down if the disk has filled
        up meanwhile.
        """
        restarting = asyncio.create_task(self._restart(name, drain_s, changed), name=f"restart {name}")
        try:
            return await asyncio.shield(restarting)
        except asyncio.CancelledError:
            if not restarting.done():
                self._progress.say(f"interrupted: {name} is still restarted; once more leaves it down")
                await restarting
            raise

    async def _restart(self, name: str, drain_s: float, changed: PartSpec | None) -> Restarted:
        number, part = {part.name: (number, part) for number, part in enumerate(self._state.parts)}[name]
        spec = changed or part.spec
        before = await self._active()
        # What cannot be written now cannot be once the part has stopped.
        self._folder.write(self._state)
        stopping_s = await self._stop(part, drain_s)
        began_s = time.monotonic()
        process = self._start(spec)
        self._state.parts[number] = process.part
        self._record(process.part)
        await self.use(process, before)
        return Restarted(stopping_s, time.monotonic() - began_s)

    async def add(self, spec: PartSpec) -> None:
        """Start a part more; return once the cluster uses it. Raise PartFailed; it is not running then."""
        before = await self._active()
        process = self.launch(spec)
        try:
            await self.use(process, before)
        except PartFailed:
            await self.remove(spec.name, 0.0)
            raise

    def launch(self, spec: PartSpec) -> PartProcess:
        """Start a part more, and return at once.

        Raise PartFailed, or RunFolderUnusable if the state cannot be written; it is not running then.
        """
        process = self._start(spec)
        self._state.parts.append(process.part)
        self._record(process.part)
        return process

    def _record(self, part: Part) -> None:
        """Write the state with a part that was started. Stop it if that fails: nobody would find it."""
        try:
            self._folder.write(self._state)
        except RunFolderUnusable:
            stop_part(part, 0.0, self._reap)
            raise

    async def remove(self, name: str, drain_s: float = DRAIN_S) -> None:
        """Stop a part for good; a worker hands over its requests first."""
        (part,) = (part for part in self._state.parts if part.name == name)
        # What cannot be written now cannot be once the part has stopped.
        self._folder.write(self._state)
        await self._stop(part, drain_s)
        self._state.parts.remove(part)
        self._folder.write(self._state)

    async def use(self, process: PartProcess, before: Mapping[str, str]) -> None:
        """Wait until a part that was started is ready, and all instances of `before`, which were active, are
        in use again. Raise PartFailed."""
        running = [part.name for part in self._state.staying if part.identity.alive()]
        if waits_for_worker(process.spec, self._state.scaled, running):
            return
        await wait_ready(process, self._progress, self._state.certificates)
        await self._settle(process.spec, before)

    async def _active(self) -> dict[str, str]:
        """Return the incarnations of the active instances that are to stay."""
        active = await active_instances(self._state.admins, self._transport)
        leaving = {part.name for part in self._state.parts if part.leaving}
        return {name: incarnation for name, incarnation in active.items() if name not in leaving}

    async def _stop(self, part: Part, drain_s: float) -> float:
        began_s = time.monotonic()
        self._progress.show(part.name, Step.STOPPING)
        await asyncio.to_thread(stop_part, part, drain_s, self._reap)
        return time.monotonic() - began_s

    def _reap(self) -> None:
        for process in self._processes:
            process.reap()

    def _start(self, spec: PartSpec) -> PartProcess:
        self._progress.show(spec.name, Step.STARTING)
        log = self._folder.logs / f"{spec.name}.log"
        _rotate(log)
        environment = {**self._environment, **spec.environment}
        process = PartProcess(spec, log, environment, self._state.directory)
        self._processes.append(process)
        return process

    async def _settle(self, spec: PartSpec, before: Mapping[str, str]) -> None:
        """Wait until the schedulers list every instance that they had, those of a restarted worker with new
        incarnations."""
        if spec.tier is Tier.ETCD:
            return
        expected = set(before) | set(spec.members)
        try:
            async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                while True:
                    now = await active_instances(self._state.admins, self._transport)
                    if expected <= now.keys() and not any(
                        now[name] == before.get(name) for name in spec.members
                    ):
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise PartFailed(
                f"{spec.name} is running again, but the scheduler does not see all of "
                f"{', '.join(sorted(expected))}; logs: {self._folder.logs}"
            ) from None


def find_parts(state: RunState) -> dict[str, Part]:
    """Return the parts by name, in the order of a rolling restart: dependencies first."""
    return {part.name: part for part in sorted(state.staying, key=lambda part: part.place)}


def _rotate(log: Path) -> None:
    """Keep the log of the previous run."""
    if log.exists():
        log.replace(log.with_suffix(".previous.log"))
