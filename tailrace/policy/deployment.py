"""Facts about a deployment that policies and batch orders plan with; each declares which ones it needs."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.profiles import Profile
from tailrace.slo import Slo


class Fact(enum.StrEnum):
    """One fact; its value is the name of the constructor's keyword argument."""

    # Step times of instances that have not been measured (`Profile`).
    PROFILE = "profile"
    # The cost of unequal lengths in a batch (`FittedLengthPenalty`).
    PENALTY = "penalty"
    # The deployment's SLOs: seconds, seconds, and a QoE from 0 to 1.
    TTFT_SLO = "ttft_slo_s"
    TPOT_SLO = "tpot_slo_s"
    QOE_SLO = "qoe_slo"
    # Users' reading pace, in seconds per token.
    PACE = "pace_s"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is known about the deployment when a policy is created; None: unknown, the policy uses its
    default."""

    slo: Slo = Slo()  # noqa: RUF009 - immutable
    profile: Profile | None = None
    penalty: FittedLengthPenalty | None = None

    def facts(self, needed: Iterable[Fact]) -> dict[str, object]:
        """Return constructor keyword arguments for the facts that are both needed and known."""
        known: dict[Fact, object] = {
            Fact.PROFILE: self.profile,
            Fact.PENALTY: self.penalty,
            Fact.TTFT_SLO: self.slo.ttft_s,
            Fact.TPOT_SLO: self.slo.tpot_s,
            Fact.QOE_SLO: self.slo.qoe,
            Fact.PACE: self.slo.reading_s,
        }
        return {fact.value: known[fact] for fact in needed if known[fact] is not None}
