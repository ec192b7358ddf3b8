"""Measure this worker's engine, and store the profile in etcd for all instances of its kind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sized
from contextlib import AbstractContextManager
from typing import Final

import msgspec

from tailrace.messages import profile_message
from tailrace.records import PROFILES, ProfileRecord
from tailrace.store.store import Store
from tailrace.telemetry.incidents import loop_failed, loop_named
from tailrace.v1 import profile_pb2
from worker_agent.engine.base import Engine, EngineInfo
from worker_agent.profiling.fitting import TooFewSamples, kind_of, profile_of
from worker_agent.profiling.measure import measure
from worker_agent.profiling.probes import ProbeFailed, Probes

log = logging.getLogger(__name__)

_LOOP: Final = loop_named("profiling")
BUDGET_S: Final = 60.0
BUDGET_MAX_S: Final = 600.0
# Time beyond the budget for a step in progress, the fits and etcd.
_MARGIN_S: Final = 30.0


class Refused(Exception):
    """Profiling was refused; the message says why."""


class ProfilingFailed(Exception):
    """Profiling was started but gave no profile; the message says why."""


class Profiler:
    """The profiler of a worker; it runs one profiling at a time."""

    def __init__(
        self,
        instance_id: str,
        engine: Engine,
        info: EngineInfo,
        probes: Probes,
        users: Sized,
        store: Store,
        tpot_s: Callable[[], float],
        engine_order: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`users`: the requests that the worker carries. `tpot_s`: returns the current TPOT SLO for Max
        Running Tokens. `engine_order`: has the engine use its own batch order during a block, since another
        may keep probes back for the sake of others."""
        self.kind = kind_of(info)
        self._instance_id = instance_id
        self._engine = engine
        self._info = info
        self._probes = probes
        self._users = users
        self._store = store
        self._tpot_s = tpot_s
        self._engine_order = engine_order
        self._busy = False

    async def profile(
        self, report: Callable[[str], None], *, force: bool = False, budget_s: float = BUDGET_S
    ) -> ProfileRecord:
        """Measure the engine and store the profile. Cancelling aborts the probes.

        `report` gets progress messages; `force`: measure even if the worker carries requests. Raise Refused,
        ProfilingFailed or StoreUnavailable.
        """
        if self._busy:
            raise Refused(f"{self._instance_id} is already being profiled")
        if len(self._users) and not force:
            raise Refused(
                f"{self._instance_id} carries {len(self._users)} requests: profile it when it is idle "
                "(tailrace drain empties it), or use --force"
            )
        self._busy = True
        try:
            record = await self._measured(report, force, min(budget_s, BUDGET_MAX_S))
        finally:
            self._busy = False
        await self._store.put(f"{PROFILES}{self.kind}", msgspec.json.encode(record))
        return record

    async def at_start(self, budget_s: float = BUDGET_S) -> None:
        """Measure unless there is a profile of this kind.

        Of equal workers that start together, one measures and the others wait for it. After a failure the
        worker serves without a profile. Raise StoreUnavailable.
        """
        if await self._store.get(f"{PROFILES}{self.kind}") is not None:
            log.info("%s is already profiled as %s", self._instance_id, self.kind)
            return
        lease = await self._store.grant_lease(budget_s + _MARGIN_S)
        if await self._store.create_leased(self._lock, self._instance_id.encode(), lease):
            try:
                await self.profile(self._log, budget_s=budget_s)
            except (Refused, ProfilingFailed) as error:
                log.warning("%s starts without a profile: %s", self._instance_id, error)
            finally:
                await self._store.revoke_lease(lease)
            return
        await self._store.revoke_lease(lease)
        log.info("%s waits for another %s to be profiled", self._instance_id, self.kind)
        await self._other_ended(budget_s + 2 * _MARGIN_S)

    @property
    def _lock(self) -> str:
        return f"profiling/{self.kind}"

    async def _other_ended(self, most_s: float) -> None:
        try:
            async with asyncio.timeout(most_s):
                async for mapping in self._store.watch_prefix(self._lock):
                    if not mapping:
                        return
        except TimeoutError:
            log.warning("%s starts without a profile: no worker finished one", self._instance_id)

    def _log(self, text: str) -> None:
        log.info("%s profiles: %s", self._instance_id, text)

    async def _measured(self, report: Callable[[str], None], force: bool, budget_s: float) -> ProfileRecord:
        loop = asyncio.get_running_loop()
        self._probes.exclusive = not force
        began_s = loop.time()
        try:
            with self._engine_order():
                samples = await measure(self._engine, self._info, self._probes, budget_s, report)
            took_s = loop.time() - began_s
            return profile_of(self._info, self._instance_id, samples, self._tpot_s(), took_s)
        except ProbeFailed as error:
            raise ProfilingFailed(f"{self._instance_id}: {error}") from error
        except TooFewSamples as error:
            raise ProfilingFailed(
                f"{self._instance_id}: {error}; give it more than {budget_s:g} s"
            ) from error
        except Exception as error:
            # Nobody else's concern: neither its caller nor, at its start, the worker ends by it.
            loop_failed(_LOOP, self._instance_id, error)
            raise ProfilingFailed(f"{self._instance_id}: {type(error).__name__}: {error}") from error


# More than the number of steps in a plan; further progress messages are dropped.
_NEWS_MAX: Final = 256


async def profile_events(
    profiler: Profiler, request: profile_pb2.ProfileRequest
) -> AsyncGenerator[profile_pb2.ProfileEvent]:
    """Yield progress messages, then the profile. Raise Refused, ProfilingFailed or StoreUnavailable."""
    news: asyncio.Queue[str | None] = asyncio.Queue(_NEWS_MAX)

    def report(text: str) -> None:
        if not news.full():
            news.put_nowait(text)

    async def run() -> ProfileRecord:
        try:
            return await profiler.profile(report, force=request.force, budget_s=request.budget_s or BUDGET_S)
        finally:
            if news.full():
                news.get_nowait()
            news.put_nowait(None)

    task = asyncio.create_task(run(), name="profiling")
    try:
        while (text := await news.get()) is not None:
            yield profile_pb2.ProfileEvent(message=text)
        yield profile_pb2.ProfileEvent(profile=profile_message(await task))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
