"""A shadow policy: asked the same questions as the policy in force; its answers are only compared and
counted."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tailrace.actions import Action, CopyPrefix, Migrate, Offer, Place, Placement, Refuse
from tailrace.control.active_policy import ActivePolicy
from tailrace.control.answers import Answer
from tailrace.control.guard import PolicyGuard, patient_guard
from tailrace.control.runner import Asked, DecisionPoint
from tailrace.records import PolicyRecord, suspended
from tailrace.slo import Slo


class Verdict(enum.Enum):
    """How the shadow's answer compares; the `reason` of an action is not compared."""

    SAME = "same"
    DIFFERENT = "different"
    # One of the two gave no answer, or a bad one.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One question with both policies' answers."""

    point: DecisionPoint
    request_id: str
    policy: str
    decided: Answer
    shadow: Answer
    verdict: Verdict


class Shadow:
    """Watch a PolicyRunner and ask another policy. Ticks and length statistics are those of the policy in
    force.

    A shadow that the guard suspends is not asked any more.
    """

    def __init__(
        self,
        record: PolicyRecord,
        slo: Slo,
        on_compared: Callable[[Comparison], None],
        guard: PolicyGuard | None = None,
    ) -> None:
        """`on_compared` is called with each comparison; `guard` asks this policy alone (None: one that does
        not suspend it).

        Raise UnknownPolicyError, UnusablePolicyError or ParameterError.
        """
        self.active = ActivePolicy(record, slo)
        self.counts: Counter[tuple[DecisionPoint, Verdict]] = Counter()
        self.guard = guard or patient_guard()
        self.guard.on_suspend = self._suspend
        self._on_compared = on_compared

    @property
    def suspended(self) -> str:
        """Return why it is not asked any more; empty: it is."""
        return self.active.record.suspended

    def _suspend(self, why: str) -> None:
        self.active.follow(suspended(self.active.record, why), self.active.slo)

    def follow_slo(self, slo: Slo) -> None:
        """Plan for these SLOs from now on."""
        self.active.follow(self.active.record, slo)

    def answered(self, policy: str, question: Asked[Answer], answer: Answer) -> None:
        """Compare a decision."""
        if self.suspended:
            return
        shadow, point = self.guard.ask(self.active, question), question.point
        if answer is None or shadow is None:
            verdict = Verdict.FAILED
        else:
            verdict = Verdict.SAME if outcome(answer) == outcome(shadow) else Verdict.DIFFERENT
        self.counts[point, verdict] += 1
        self._on_compared(Comparison(point, question.request_id, policy, answer, shadow, verdict))


_NO_REASON: Final = ""


def outcome(answer: Placement | Sequence[Action]) -> object:
    """Return the answer without the reasons."""
    match answer:
        case Refuse():
            return Refuse(_NO_REASON)
        case Place():
            return replace(answer, also=tuple(map(_without_reason, answer.also)))
        case _:
            return tuple(map(_without_reason, answer))


def _without_reason(action: Action) -> Action:
    return replace(action, reason=_NO_REASON) if isinstance(action, (Migrate, Offer, CopyPrefix)) else action
