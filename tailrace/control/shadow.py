"""A shadow policy: asked the same questions as the policy in force; its answers are only compared and
counted."""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from tailrace.actions import Action, CopyPrefix, Migrate, Offer, Place, Placement, Refuse
from tailrace.control.runner import ActivePolicy, PlaceQuestion, Point, Question
from tailrace.records import PolicyRecord
from tailrace.slo import Slo

log = logging.getLogger(__name__)

T = TypeVar("T")
Answer = Placement | Sequence[Action] | None


class Verdict(enum.Enum):
    """How the shadow's answer compares; the `reason` of an action is not compared."""

    SAME = "same"
    DIFFERENT = "different"
    # One of the two raised.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One question with both policies' answers."""

    point: Point
    request_id: str
    policy: str
    decided: Answer
    shadow: Answer
    verdict: Verdict


class Shadow:
    """Watch a PolicyRunner and ask another policy. Ticks and length statistics are those of the policy in
    force."""

    def __init__(self, record: PolicyRecord, slo: Slo, on_compared: Callable[[Comparison], None]) -> None:
        """`on_compared` is called with each comparison.

        Raise UnknownPolicyError, UnusablePolicyError or ParameterError.
        """
        self.active = ActivePolicy(record, slo)
        self.counts: Counter[tuple[Point, Verdict]] = Counter()
        self._on_compared = on_compared
        self._logged: set[Point] = set()

    def follow_slo(self, slo: Slo) -> None:
        """Plan for these SLOs from now on."""
        self.active.follow(None, slo)

    def placed(self, policy: str, question: PlaceQuestion, placement: Placement) -> None:
        """Compare a placement."""
        other = self._ask(Point.PLACE, lambda: question.ask(self.active.policy))
        self._compare(Point.PLACE, question.arrival.request_id, policy, placement, other)

    def decided(self, policy: str, question: Question, actions: Sequence[Action] | None) -> None:
        """Compare any other decision."""
        other = self._ask(question.point, lambda: question.ask(self.active.policy))
        request_id = "" if question.request is None else question.request.request_id
        self._compare(question.point, request_id, policy, actions, other)

    def _compare(self, point: Point, request_id: str, policy: str, decided: Answer, shadow: Answer) -> None:
        if decided is None or shadow is None:
            verdict = Verdict.FAILED
        else:
            verdict = Verdict.SAME if outcome(decided) == outcome(shadow) else Verdict.DIFFERENT
        self.counts[point, verdict] += 1
        self._on_compared(Comparison(point, request_id, policy, decided, shadow, verdict))

    def _ask(self, point: Point, ask: Callable[[], T]) -> T | None:
        """Return the answer, or None if the policy raised, which is logged once per decision point."""
        try:
            return ask()
        except Exception:
            if point not in self._logged:
                self._logged.add(point)
                log.warning("shadow policy %s fails at %s", self.active.name, point.value, exc_info=True)
            return None


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
