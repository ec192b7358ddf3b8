"""Facts of a deployment that policies and batch orders may plan with; each declares which it needs."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.profiles import Profile
from tailrace.slo import Slo


class Fact(enum.StrEnum):
    """One fact; its value is the name of the constructor's keyword argument."""

    # Step times of instances of which nothing has been measured (`Profile`).
    PROFILE = "profile"
    # What unequal lengths in a batch cost there (`FittedLengthPenalty`).
    PENALTY = "penalty"
    # The deployment's SLOs: seconds, seconds, and a QoE from 0 to 1.
    TTFT_SLO = "ttft_slo_s"
    TPOT_SLO = "tpot_slo_s"
    QOE_SLO = "qoe_slo"
    # Seconds a token at which users read.
    PACE = "pace_s"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is known of the deployment when a policy is made; None: unknown, the policy has a default."""

    slo: Slo = Slo()  # noqa: RUF009 - immutable
    profile: Profile | None = None
    penalty: FittedLengthPenalty | None = None

    def facts(self, needed: Iterable[Fact]) -> dict[str, object]:
        """Keyword arguments for those that are needed and known."""
        known: dict[Fact, object] = {
            Fact.PROFILE: self.profile,
            Fact.PENALTY: self.penalty,
            Fact.TTFT_SLO: self.slo.ttft_s,
            Fact.TPOT_SLO: self.slo.tpot_s,
            Fact.QOE_SLO: self.slo.qoe,
            Fact.PACE: self.slo.reading_s,
        }
        return {fact.value: known[fact] for fact in needed if known[fact] is not None}
