"""The policy and the SLOs in force: as in etcd, and as this scheduler has just set or suspended them.

A policy is suspended by its guard, after bad or late answers (`Following.suspend`), or because a call of it
does not return: then the process runs again without it (`Following.watched_calls`).
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec

from scheduler_svc.admin.validation import check_slo, policy_record
from scheduler_svc.settings import ETCD_LAG_S, Conflict, Settings
from tailrace.control.events import PolicyFollowed
from tailrace.control.guard import PolicyCall, PolicyGuard
from tailrace.control.live import LiveControl
from tailrace.records import PolicyRecord, resumed, suspended
from tailrace.service.watchdog import restart_process, watched_calls
from tailrace.slo import Slo
from tailrace.store.client import StoreUnavailable
from tailrace.store.membership import Membership
from tailrace.store.reading import read_policy
from tailrace.v1 import admin_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Written(Generic[T]):
    """A value that this scheduler wrote to etcd at a revision that the watch may not have reached yet."""

    value: T
    revision: int
    until_s: float

    def outdated(self, revision: int) -> bool:
        return revision >= self.revision or time.monotonic() > self.until_s


class Following:
    """Let the control follow etcd.

    What this scheduler writes is in force at once, until etcd's watch has reached the write: from then on the
    watch is right, also about what others have written since.
    """

    def __init__(
        self, control: LiveControl, members: Membership, settings: Settings, guard: PolicyGuard
    ) -> None:
        self._guard = guard
        self._control = control
        self._members = members
        self._settings = settings
        self._policy: _Written[PolicyRecord] | None = None
        self._slo: _Written[Slo] | None = None
        # A suspension that is not in etcd yet.
        self._suspension: PolicyRecord | None = None
        self._suspending = asyncio.Event()

    def follow(self) -> None:
        """Let the control decide by what is in force."""
        revision = self._members.revision
        if self._policy is not None and self._policy.outdated(revision):
            self._policy = None
        if self._slo is not None and self._slo.outdated(revision):
            self._slo = None
        policy = self._members.policy if self._policy is None else self._policy.value
        if (suspension := self._suspension) is not None:
            if (policy or self._control.active.default) == resumed(suspension):
                policy = suspension
            else:
                # Another policy was set, or the record in etcd says the same by now.
                self._suspension = None
        with self._guard.loading(policy or self._control.active.default):
            slo = self._members.slo if self._slo is None else self._slo.value
            self._control.handle(PolicyFollowed(policy, slo))

    async def set_policy(self, request: admin_pb2.SetPolicyRequest) -> tuple[PolicyRecord | None, int]:
        """Set the policy, also one that is suspended; return the previous record or None, and the revision of
        the write. Raise AdminError or StoreUnavailable."""
        with self._guard.loading(PolicyRecord(name=request.name)):
            record = policy_record(request, self._control.active.slo)
        previous, revision = await self._settings.set_policy(record)
        self._policy = _written(record, revision)
        self._suspension = None
        self.follow()
        return previous, revision

    async def change_slo(self, changes: Mapping[str, float]) -> tuple[Slo, Slo, int]:
        """Change objectives by name; return the SLOs before and after, and the revision of the write. Raise
        Conflict, ParameterError or StoreUnavailable, or AdminError if the policy in force refuses them."""
        before, slo, revision = await self._settings.change_slo(changes, self._check_slo)
        self._slo = _written(slo, revision)
        self.follow()
        return before, slo, revision

    def _check_slo(self, slo: Slo) -> None:
        record = self._control.active.record
        # `least_loaded` decides for a suspended one.
        if not record.suspended:
            with self._guard.loading(record):
                check_slo(record, slo)

    def suspend(self, why: str) -> None:
        """Suspend the policy in force: here at once, everywhere once `run` has written it."""
        self.suspend_record(suspended(self._control.active.record, why))
        self.follow()

    def suspend_record(self, record: PolicyRecord) -> None:
        """Suspend a policy, as its record says, once it is in force."""
        log.error("policy %s is suspended, and least_loaded decides: %s", record.name, record.suspended)
        self._suspension = record
        self._suspending.set()

    async def run(self) -> None:
        """Write suspensions to etcd; run until cancelled."""
        while True:
            await self._suspending.wait()
            while (record := self._suspension) is not None:
                try:
                    revision = await self._settings.suspend_policy(record, self._control.active.default)
                except (StoreUnavailable, Conflict) as error:
                    log.warning("the suspension of %s is not in etcd yet: %s", record.name, error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                if record is self._suspension:
                    self._suspension = None
                    if revision:
                        self._policy = _written(record, revision)
                    self.follow()
            # Not before: if this loop fails and starts again, there is still something to write.
            self._suspending.clear()

    # ---- calls that do not return, as seen from the watchdog's thread

    def watched_calls(self) -> AbstractContextManager[None]:
        """Watch the calls of policies during the block.

        A policy whose call took more than a second is suspended when the call returns. If a call does not
        return within three, this process runs again, with the policy suspended from its beginning: a call
        cannot be ended in any other way. Neither happens without a watchdog (TAILRACE_WATCHDOG_S=0), nor
        while a call holds the interpreter's lock: then the process ends after four times the watchdog's
        timeout.
        """
        return watched_calls(self._current_call, self._on_late, self._on_hung)

    def _guards(self) -> list[PolicyGuard]:
        shadow = self._control.shadow
        return [self._guard] if shadow is None else [self._guard, shadow.guard]

    def _current_call(self) -> object | None:
        return next((call for guard in self._guards() if (call := guard.call) is not None), None)

    def _on_late(self, call: object) -> None:
        assert isinstance(call, PolicyCall)
        for guard in self._guards():
            # In the watchdog's thread: by the next line the call may have ended, and another one begun.
            if guard.call is call:
                guard.stuck = call

    def _on_hung(self, call: object, seconds: float) -> None:
        assert isinstance(call, PolicyCall)
        what, name, active = call.what, call.of.name, self._control.active
        log.critical(
            "policy %s has not returned from %s for %.1f s: restarting without it", name, what, seconds
        )
        faulthandler.dump_traceback()
        record = active.record if call.of is active else call.of
        if isinstance(record, PolicyRecord):
            why = f"{what}: did not return within {seconds:.1f} s"
            os.environ[_HUNG] = msgspec.json.encode(suspended(record, why)).decode()
        restart_process()


# Environment variable from one run of this process to the next: the policy whose call did not return.
_HUNG: Final = "TAILRACE_HUNG_POLICY"


def hung_before() -> PolicyRecord | None:
    """Return the policy, suspended, because of which the previous run of this process ended; None if it was
    none."""
    return read_policy(os.environ.pop(_HUNG, "").encode())


def _written(value: T, revision: int) -> _Written[T]:
    return _Written(value, revision, time.monotonic() + ETCD_LAG_S)
