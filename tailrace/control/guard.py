"""What happens to a policy's bad or late answer: `PolicyGuard` protects a live scheduler from it, and
`PlainCalls` ends a simulation."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeVar

from tailrace.actions import Placement
from tailrace.control.answers import BadAnswer
from tailrace.control.runner import Asked, DecisionPoint, PlaceQuestion, PolicyInForce, ask
from tailrace.policy.base import Policy
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.records import PolicyRecord

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Budgets:
    """When a policy is suspended."""

    # Seconds for a placement, and for any other question about one request.
    call_s: float = 0.05
    # For a tick, as a share of the policy's interval.
    tick_share: float = 0.5
    # How many answers in a row at one decision point may be bad or late.
    failures: int = 5


DEFAULT_BUDGETS: Final = Budgets()


class PolicyGuard:
    """Ask a policy in a live scheduler, where every request needs a placement whatever the policy does.

    `least_loaded` places instead of a policy that gives a bad answer; elsewhere nothing is done. After some
    such answers in a row `on_suspend` is called with the reason: then `least_loaded` decides, here at once
    and through etcd everywhere, until somebody sets a policy (scheduler_svc/following.py).

    A late answer is used. It counts as bad only if the one before was late or bad, too, and if it is late
    without the time in which this thread waited for a core: on a busy machine one call in thousands takes
    longer than any budget, and no policy is to blame. A call that takes more than a second, or does not
    return at all, is found by another thread: the policy is suspended when the call returns, and after three
    seconds the process runs again without it (`Following.watched_calls`).
    """

    def __init__(
        self,
        metrics: CallMetrics,
        budgets: Budgets = DEFAULT_BUDGETS,
        waited_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`waited_s`: returns for how many seconds this thread has been ready to run, but did not."""
        self._metrics = metrics
        self._budgets = budgets
        self._waited_s = waited_s
        self._fallback = LeastLoaded()
        # Bad answers in a row of this policy, by point; those with none are absent.
        self._policy: Policy | None = None
        self._in_a_row: dict[DecisionPoint, int] = {}
        self.on_suspend: Callable[[str], None] = lambda why: None
        # The call in progress, and the one that its watcher found to be much too late.
        self.call: PolicyCall | None = None
        self.stuck: PolicyCall | None = None

    def place(self, policy_in_force: PolicyInForce, question: PlaceQuestion) -> Placement:
        """Return the policy's placement, or that of `least_loaded`."""
        placement = self.ask(policy_in_force, question)
        return ask(self._fallback, question) if placement is None else placement

    def another(self) -> PolicyGuard:
        """Return a guard with the same budgets for a policy that decides nothing."""
        return PolicyGuard(LoggedOnce(), self._budgets, self._waited_s)

    @contextmanager
    def loading(self, record: PolicyRecord) -> Iterator[None]:
        """Show the watcher that a policy is loaded during the block."""
        self.call = PolicyCall(record, "load")
        try:
            yield
        finally:
            self.call = None

    def ask(self, policy_in_force: PolicyInForce, question: Asked[T]) -> T | None:
        """Return the policy's answer; None if it is bad."""
        policy, point = policy_in_force.policy, question.point
        if policy is not self._policy:
            self._policy = policy
            self._in_a_row.clear()
        in_a_row = self._in_a_row.get(point, 0)
        waited_s = self._waited_s() if in_a_row else 0.0
        call = self.call = PolicyCall(policy_in_force, point.value)
        answer: T | None = None
        why = ""
        began_s = time.perf_counter()
        try:
            answer = ask(policy, question)
        except BadAnswer as error:
            why = str(error)
        finally:
            took_s = time.perf_counter() - began_s
            self.call = None
        self._metrics.observe_duration(point, took_s)
        if not why:
            budget_s = self._budget_s(policy_in_force, point)
            if in_a_row and took_s > budget_s:
                took_s -= self._waited_s() - waited_s
            if took_s <= budget_s:
                if in_a_row:
                    del self._in_a_row[point]
                return answer
            why = f"took {took_s * 1e3:.0f} ms; its budget is {budget_s * 1e3:g} ms"
            if not in_a_row and call is not self.stuck:
                # Watched more closely from now on.
                self._in_a_row[point] = 1
                return answer
        self._in_a_row[point] = in_a_row + 1
        self._metrics.failed(policy_in_force.name, point, why)
        if in_a_row + 1 >= self._budgets.failures or call is self.stuck:
            times = f", {in_a_row + 1} times in a row" if in_a_row else ""
            self.on_suspend(f"{point.value}: {why}{times}")
        return answer

    def _budget_s(self, policy_in_force: PolicyInForce, point: DecisionPoint) -> float:
        interval_s = policy_in_force.declared.tick_interval_s if point is DecisionPoint.TICK else None
        return self._budgets.call_s if interval_s is None else interval_s * self._budgets.tick_share


def patient_guard() -> PolicyGuard:
    """Return a guard that suspends no policy, and counts nothing: a replay must not depend on the machine's
    speed."""
    return PolicyGuard(LoggedOnce(), Budgets(math.inf, math.inf, sys.maxsize))


class PolicyCall(NamedTuple):
    """A call of a policy's code in progress, for whoever watches that it ends."""

    # The policy that was asked, or the record of the one that is being loaded.
    of: PolicyInForce | PolicyRecord
    # The decision point, or "load".
    what: str


class CallMetrics(Protocol):
    """Count calls of policies."""

    def observe_duration(self, point: DecisionPoint, seconds: float) -> None: ...
    def failed(self, policy: str, point: DecisionPoint, why: str) -> None:
        """Count and log a bad answer, or one that came too late."""
        ...


class LoggedOnce:
    """Count nothing, and log the first bad answer of a policy at each decision point."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, DecisionPoint]] = set()

    def observe_duration(self, point: DecisionPoint, seconds: float) -> None:
        """Ignore durations."""

    def failed(self, policy: str, point: DecisionPoint, why: str) -> None:
        """Log the first one."""
        if (policy, point) not in self._logged:
            self._logged.add((policy, point))
            log.warning("policy %s at %s: %s", policy, point.value, why)


class PlainCalls:
    """Ask the policy, and end the run at a bad answer: what it would be replaced by is no result of this
    policy."""

    def place(self, policy_in_force: PolicyInForce, question: PlaceQuestion) -> Placement:
        """Return the policy's placement. Raise PolicyFailed."""
        return self.ask(policy_in_force, question)

    def ask(self, policy_in_force: PolicyInForce, question: Asked[T]) -> T:
        """Return the policy's answer. Raise PolicyFailed."""
        try:
            return ask(policy_in_force.policy, question)
        except BadAnswer as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                # Ctrl-C, since this process runs in a terminal.
                raise error.__cause__ from None
            name, point = policy_in_force.name, question.point.value
            raise PolicyFailed(f"policy {name} at {point}: {error}") from error


class PolicyFailed(RuntimeError):
    """A policy gave a bad answer in a run that can only end then; the message names both."""
