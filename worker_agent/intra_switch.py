"""Choose the order in which a worker's engine serves its requests: a fixed one, or that of the fleet's
policy."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Final, NoReturn, TypeAlias

from tailrace.intra.base import ENGINE_ORDER
from tailrace.intra.guarded import Asked, order_asked
from tailrace.intra.registry import UnknownIntraError, intra_facts, intra_parameters
from tailrace.policy.parameters import NO_PARAMETERS, ParameterError, Value
from tailrace.policy.registry import UnknownPolicyError, UnusablePolicyError, choose
from tailrace.records import PolicyRecord
from tailrace.service.watchdog import restart_process, watched_calls
from tailrace.slo import Slo

log = logging.getLogger(__name__)

# Instead of a name: the fleet's policy determines the order, also when it is switched.
BY_POLICY: Final = "policy"

# Longest that an order may take for one answer. Front ends normally give up a silent worker later: what they
# are told before, they do not hold against its requests.
_HUNG_S: Final = 2.0
# Time for a goodbye to leave the socket.
_GOODBYE_S: Final = 0.2
# Environment variable from one run of this process to the next: the order that did not return.
_HUNG: Final = "TAILRACE_HUNG_ORDER"
# Longest that another package may take to be imported.
_LOAD_S: Final = 60.0

# An order's name and its parameters.
Order: TypeAlias = tuple[str, Mapping[str, Value]]
# With the facts about the deployment that it uses.
_Requested: TypeAlias = tuple[Order, Mapping[str, object]]


class IntraSwitch:
    """Set the engine's order, and set it again with each change of the order or of the SLOs behind it."""

    def __init__(
        self,
        intra: str,
        policy: Callable[[], PolicyRecord | None],
        slo: Callable[[], Slo],
        set_intra: Callable[[str, Mapping[str, Value], Slo], None],
        hung: str = "",
    ) -> None:
        """`intra`: an order, or BY_POLICY. `policy()` returns the fleet's current policy, `slo()` the
        deployment's SLOs. `hung`: an order that is not used: `hung_before`."""
        self._hung = hung
        # Whether the order asked for is that one.
        self.refuses_hung = False
        self._intra = intra
        self._policy = policy
        self._slo = slo
        self._set_intra = set_intra
        self._present: _Requested | None = None
        # What `_set_intra` took last, to return to it, and whether the engine's own order is used meanwhile.
        self._applied: tuple[str, Mapping[str, Value], Slo] | None = None
        self._is_set_aside = False
        self._unavailable: PolicyRecord | None = None
        # The load that was begun last, and of what.
        self._loading: tuple[tuple[PolicyRecord | None, Slo], asyncio.Future[_Requested]] | None = None
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Have `run` look at the policy and the SLOs again."""
        self._changed.set()

    async def run(self) -> None:
        """Apply every change; run until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.update()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Use the engine's own order during the block. Changes meanwhile are applied afterwards."""
        self._is_set_aside = True
        self._set_intra(ENGINE_ORDER, NO_PARAMETERS, self._slo())
        try:
            yield
        finally:
            self._is_set_aside = False
            if self._applied is not None:
                self._set_intra(*self._applied)
            self._changed.set()

    async def update(self) -> None:
        """Apply a change of order or SLOs. Parameters that this worker cannot use change nothing.

        Raise UnknownIntraError.
        """
        record, slo = self._policy(), self._slo()
        requested = await self._requested(record, slo)
        if self._is_set_aside or requested == self._present:
            return
        # Set first, so that a change that fails is tried only once.
        self._present = requested
        (name, parameters), _ = requested
        try:
            self._apply(name, parameters, slo)
        except ParameterError as error:
            log.error("cannot change the batch order: %s", error)
            return
        except UnknownIntraError as error:
            if self._intra != BY_POLICY:
                raise
            log.error("using the engine's own batch order, not that of the policy: %s", error)
            self._apply(ENGINE_ORDER, NO_PARAMETERS, slo)
            return
        log.info("batch order: %r %s", name, dict(parameters))

    def _apply(self, name: str, parameters: Mapping[str, Value], slo: Slo) -> None:
        self._set_intra(name, parameters, slo)
        self._applied = name, parameters, slo

    async def _requested(self, record: PolicyRecord | None, slo: Slo) -> _Requested:
        """Return the order to serve in; the engine's own for a policy that is not installed here: then only
        the scheduler's part of it is in effect."""
        try:
            async with asyncio.timeout(_LOAD_S):
                return await asyncio.shield(self._loaded(record, slo))
        except TimeoutError:
            problem = f"its package was not imported within {_LOAD_S:g} s"
            if self._loading is not None:
                # It is looked at again when it is there.
                self._loading[1].add_done_callback(lambda _: self._changed.set())
        except (UnknownPolicyError, UnusablePolicyError, UnknownIntraError, ParameterError) as error:
            if self._intra != BY_POLICY:
                raise
            problem = str(error)
        # Log once, not at every change in etcd.
        if record != self._unavailable:
            log.error("using the engine's own batch order, not that of the policy: %s", problem)
        self._unavailable = record
        return (ENGINE_ORDER, NO_PARAMETERS), {}

    def _loaded(self, record: PolicyRecord | None, slo: Slo) -> asyncio.Future[_Requested]:
        """Load what is asked for, unless that is loaded or being loaded: a package that is imported may take
        long, in which front ends would give up this worker, or never return, which costs one thread."""
        if self._loading is not None and self._loading[0] == (record, slo):
            loading = self._loading[1]
            # What could not be loaded may have been installed since.
            if not loading.done() or loading.exception() is None:
                return loading
        executor = ThreadPoolExecutor(1, thread_name_prefix="batch-order")
        loading = asyncio.get_running_loop().run_in_executor(executor, self._load, record, slo)
        executor.shutdown(wait=False)
        self._loading = (record, slo), loading
        return loading

    def _load(self, record: PolicyRecord | None, slo: Slo) -> _Requested:
        order = order_of_policy(record) if self._intra == BY_POLICY else (self._intra, NO_PARAMETERS)
        self.refuses_hung = order[0] == self._hung
        if self.refuses_hung:
            order = ENGINE_ORDER, NO_PARAMETERS
        return order, intra_facts(order[0], slo)


def watched_orders(say_goodbye: Callable[[str], None]) -> AbstractContextManager[None]:
    """Watch the questions to batch orders of other packages during the block: a call that does not return
    cannot be ended, so the process runs again, without that order. Not without a watchdog
    (TAILRACE_WATCHDOG_S=0), nor if the call holds the interpreter's lock.

    `say_goodbye(reason)` tells front ends before that, from another thread.
    """

    def on_hung(asked: object, seconds: float) -> None:
        assert isinstance(asked, Asked)
        restart_without(asked, f"for {seconds:.1f} s", say_goodbye)

    return watched_calls(order_asked, lambda _: None, on_hung, _HUNG_S, _thread_of)


def _thread_of(asked: object) -> int:
    assert isinstance(asked, Asked)
    return asked.thread


def restart_without(asked: Asked, since: str, say_goodbye: Callable[[str], None]) -> NoReturn:
    """Run this process again, without the order that did not return.

    Without a goodbye it would seem to have died of its requests, and one that was on two such workers would
    not be tried again.
    """
    what = f"order {asked.order} has not returned from {asked.point}"
    log.critical("%s %s: restarting without it", what, since)
    faulthandler.dump_traceback()
    os.environ[_HUNG] = asked.order
    try:
        say_goodbye(what)
        time.sleep(_GOODBYE_S)
    finally:
        restart_process()


def hung_before() -> str:
    """Return the order because of which the previous run of this process ended; empty: none."""
    return os.environ.get(_HUNG, "")


def order_of_policy(record: PolicyRecord | None) -> Order:
    """Return the order that belongs to a policy (None: no policy is set), with its share of the policy's
    parameters.

    Raise UnknownPolicyError, UnusablePolicyError, UnknownIntraError or ParameterError.
    """
    if record is None:
        return ENGINE_ORDER, NO_PARAMETERS
    choice = choose(record.name)
    accepted = {parameter.name for parameter in intra_parameters(choice.order)}
    values = {**choice.parameters, **record.parameters}
    return choice.order, {key: value for key, value in values.items() if key in accepted}
