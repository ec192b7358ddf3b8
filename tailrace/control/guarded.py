"""How a live scheduler calls a policy: one that fails, or places where it must not, is stood in for."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from tailrace.actions import Action, Place, Placement
from tailrace.cluster import Arrival, ClusterView, InstanceState
from tailrace.control.runner import Deciding, PlaceQuestion, Point, Question
from tailrace.policy.least_loaded import LeastLoaded

log = logging.getLogger(__name__)


class CallMetrics(Protocol):
    """Counts calls of policies."""

    def took(self, point: Point, seconds: float) -> None: ...
    def failed(self, policy: str, point: Point) -> None: ...


class GuardedCalls:
    """Every request gets a place, whatever the policy does."""

    def __init__(self, metrics: CallMetrics) -> None:
        self._metrics = metrics
        self._stand_in = LeastLoaded()

    def place(self, deciding: Deciding, question: PlaceQuestion) -> Placement:
        """The policy's placement, or that of `least_loaded`."""
        began_s = time.perf_counter()
        try:
            placement = question.put_to(deciding.policy)
        except Exception:
            log.exception("policy %s failed to place; least_loaded stands in", deciding.name)
        else:
            if not isinstance(placement, Place) or may_place(
                question.view, question.arrival, placement.instance_id
            ):
                return placement
            log.error("policy %s placed on %s, which it must not", deciding.name, placement.instance_id)
        finally:
            self._metrics.took(Point.PLACE, time.perf_counter() - began_s)
        self._metrics.failed(deciding.name, Point.PLACE)
        return question.put_to(self._stand_in)

    def decide(self, deciding: Deciding, question: Question) -> Sequence[Action] | None:
        """The policy's actions; None: it failed."""
        began_s = time.perf_counter()
        try:
            return question.put_to(deciding.policy)
        except Exception:
            log.exception("policy %s failed at %s", deciding.name, question.point.value)
            self._metrics.failed(deciding.name, question.point)
            return None
        finally:
            self._metrics.took(question.point, time.perf_counter() - began_s)


def may_place(view: ClusterView, arrival: Arrival, instance_id: str) -> bool:
    """Whether the arrival may go to this instance."""
    instance = view.instances.get(instance_id)
    return (
        instance is not None
        and instance.state is InstanceState.ACTIVE
        and instance_id not in arrival.excluded
    )
