"""Run a service as a process: its main coroutine, its shutdown, and the context that every service needs."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec
import uvloop

from tailrace.records import ServiceRecord
from tailrace.service.channels import Channels
from tailrace.service.options import CommonOptions, new_incarnation
from tailrace.service.tasks import task_error
from tailrace.service.watchdog import watchdog_timeout_s, watched_loop
from tailrace.store.client import StoreUnavailable
from tailrace.store.election import Election, Leadership
from tailrace.store.membership import Membership
from tailrace.store.registration import Registration, register
from tailrace.store.store import Store
from tailrace.telemetry.log_format import start_logging
from tailrace.telemetry.membership import MembershipMetrics
from tailrace.telemetry.metrics import Page, ServiceRegistry, new_registry, serve_metrics
from tailrace.telemetry.tracing import Tracing, configure

log = logging.getLogger(__name__)


Drain = Callable[[], Coroutine[None, None, None]]


class Shutdown:
    """Hold the drain of a service: finish or hand over what is in progress, accept nothing new.

    While a service starts, or once it is closing, there is nothing to drain, and a signal ends it at once.
    """

    def __init__(self) -> None:
        self._drain: Drain | None = None
        self._timeout_s = 0.0

    @contextmanager
    def draining(self, drain: Drain, timeout_s: float) -> Iterator[None]:
        """Drain with `drain` if the service is stopped within the block; `timeout_s` bounds the draining."""
        self._drain, self._timeout_s = drain, timeout_s
        try:
            yield
        finally:
            self._drain = None

    async def run_drain(self) -> None:
        """Run the drain, if one is set. A drain that fails or takes too long is logged and ends."""
        if self._drain is None:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._drain()
        except TimeoutError:
            log.warning("not drained within %g s", self._timeout_s)
        except Exception:
            log.exception("draining failed")


# Longest duration of a clean shutdown before the process exits anyway.
_GRACE_S: Final = 15.0
# When Python looks for reference cycles: after so many objects more than were freed, and how many young
# collections precede an older one. Services make few cycles and many objects that live for a while; with
# Python's defaults (700, 10, 10) the scheduler of a large fleet stood still for up to 100 ms at a time. The
# first bounds what waits to be freed: each call to a server with interceptors leaves a cycle, in grpc.aio.
_GC_THRESHOLDS: Final = (10_000, 20, 500)
# A shell usually allows 1,024 open files, and each stream takes up to two of an API server or an edge.
_OPEN_FILES: Final = 65_536
_LEVEL: Final = "TAILRACE_LOG_LEVEL"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


_only_checking: Final = ContextVar("only_checking", default=False)


@contextmanager
def only_checking() -> Iterator[None]:
    """Have the commands of services end where they would start: they refuse what they always refuse."""
    token = _only_checking.set(True)
    try:
        yield
    finally:
        _only_checking.reset(token)


def run_service(main: Callable[[Shutdown], Coroutine[None, None, None]]) -> None:
    """Run `main` under uvloop until it returns or is told to stop; never returns.

    The first SIGTERM or SIGINT runs the drain that `main` has set in its Shutdown, if any, and then cancels
    `main`, which cleans up; a second one cuts the drain short. Exit codes: 0 if it returned or was told to
    stop; 1 if it failed, with one line on stderr for errors that an operator can fix, a traceback for bugs.

    Within `only_checking`, return at once: the command line has been checked.
    """
    if _only_checking.get():
        return
    level = os.environ.get(_LEVEL, "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        sys.exit(f"{_LEVEL}: {level!r} is none of {', '.join(logging.getLevelNamesMapping())}")
    try:
        start_logging(level)
        timeout_s = watchdog_timeout_s()
    except ValueError as error:
        sys.exit(str(error))
    gc.set_threshold(*_GC_THRESHOLDS)
    _raise_file_limit()
    # If a native library crashes, the stack trace is the only information.
    faulthandler.enable()
    # gRPC logs every lost connection repeatedly; Tailrace logs what matters of it.
    logging.getLogger("grpc").setLevel(logging.ERROR)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_signalled(main, timeout_s))
    except (StoreUnavailable, OSError) as error:
        log.error("%s", error)
        sys.exit(1)
    except Exception:
        log.exception("failed")
        sys.exit(1)
    sys.exit(0)


def _raise_file_limit() -> None:
    """Let this process, and those that it starts, open as many files as the system allows, or _OPEN_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


async def _until_signalled(
    main: Callable[[Shutdown], Coroutine[None, None, None]], watchdog_s: float
) -> None:
    loop = asyncio.get_running_loop()
    shutdown = Shutdown()
    task = asyncio.create_task(main(shutdown), name="main")
    stopping: asyncio.Task[None] | None = None

    def drained(done: asyncio.Task[None]) -> None:
        if (error := task_error(done)) is not None:
            log.error("draining failed", exc_info=error)
        task.cancel()
        exit_within_grace()

    def stop(signum: int) -> None:
        nonlocal stopping
        name = signal.Signals(signum).name
        if stopping is None:
            log.info("%s: stopping", name)
            stopping = asyncio.create_task(shutdown.run_drain(), name="drain")
            stopping.add_done_callback(drained)
        elif not stopping.done():
            log.info("%s again: stopping without draining", name)
            stopping.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    with watched_loop(watchdog_s):
        try:
            await task
        except asyncio.CancelledError:
            if stopping is None:
                raise
        finally:
            if stopping is not None:
                stopping.cancel()
                await asyncio.gather(stopping, return_exceptions=True)


def exit_within_grace() -> None:
    """Let this process end soon even if something that it closes never returns, or blocks the event loop."""
    timer = threading.Timer(_GRACE_S, _force_exit)
    timer.daemon = True
    timer.start()


def _force_exit() -> None:
    log.error("did not stop within %.0f s; exiting", _GRACE_S)
    os._exit(1)


@contextmanager
def ending_process(*expected: type[Exception]) -> Iterator[None]:
    """Run the main coroutine of an engine's process; never returns, whatever the block raises.

    The interpreter would need seconds to unload an engine's modules, in which a supervisor cannot start the
    process again, and would wait for threads that hang with the engine. `expected`: what is logged as one
    line, besides what every service logs so.
    """
    lines: tuple[type[Exception], ...] = (*expected, StoreUnavailable, OSError)
    status = 1
    try:
        yield
        status = 0
    except asyncio.CancelledError:
        log.info("stopped")
        status = 0
    except lines as error:
        log.error("%s", error)
    except Exception:
        log.exception("failed")
    finally:
        logging.shutdown()
        os._exit(status)


# They export the gauges of the whole cluster; front ends and workers, of which there are many, do not.
_CONTROL: Final = frozenset({"scheduler", "monitor", "migration"})


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """What every service needs around its own work: store, membership, channels, traces, metrics.

    Valid for the duration of its block.
    """

    kind: str
    common: CommonOptions
    store: Store
    members: Membership
    channels: Channels
    tracing: Tracing
    registry: ServiceRegistry
    metrics_address: str

    def record(self, address: str) -> ServiceRecord:
        """Return the record of a service that listens on HOST:PORT."""
        return ServiceRecord(
            kind=self.kind,
            service_id=self.common.member_id,
            incarnation=new_incarnation(),
            address=self.common.advertised(address),
            metrics_address=self.common.advertised(self.metrics_address),
        )

    @asynccontextmanager
    async def announced(self, record: ServiceRecord) -> AsyncIterator[Registration]:
        """Register this service in etcd until the block ends."""
        registration = await register(
            self.store, f"services/{record.kind}/{record.service_id}", msgspec.json.encode(record)
        )
        try:
            yield registration
        finally:
            await registration.withdraw()

    async def stand(self, address: str, leading: Leadership | None = None) -> AsyncExitStack:
        """Register this service, which listens on HOST:PORT, and have it stand for leadership. Closing what
        is returned, once or again, ends both. `leading` is set while it leads."""
        record = self.record(address)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.announced(record))
            log.info("%s serves on %s", record.service_id, address)
            election = Election(self.store, record, leading)
            election.start()
            stack.push_async_callback(election.close)
            return stack.pop_all()


@asynccontextmanager
async def open_service(
    kind: str, common: CommonOptions, pages: Mapping[str, Callable[[], Page]] = MappingProxyType({})
) -> AsyncIterator[ServiceContext]:
    """Connect to etcd and serve metrics, and `pages` beside them. Raise StoreUnavailable, or OSError if the
    metrics port is in use."""
    async with AsyncExitStack() as stack:
        store = await Store.connect(common.etcd, common.cluster, common.transport)
        stack.push_async_callback(store.close)
        members = await Membership.start(store)
        stack.push_async_callback(members.close)
        channels = Channels(common.transport)
        stack.push_async_callback(channels.close)
        tracing = await stack.enter_async_context(configure(kind, common.member_id))
        registry = new_registry(kind, common.member_id)
        if kind in _CONTROL:
            registry.register(MembershipMetrics(members))
        metrics = await stack.enter_async_context(
            serve_metrics(common.metrics, registry, common.transport, pages)
        )
        yield ServiceContext(kind, common, store, members, channels, tracing, registry, metrics.address)
