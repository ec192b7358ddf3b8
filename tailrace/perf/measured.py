"""The measurements of an instance (`tailrace profile`), as the models that policies use."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.perf.qoe_model import QoeModel
from tailrace.perf.steps import StepModel
from tailrace.perf.ttft import TtftPredictor
from tailrace.profiles import Profile
from tailrace.records import ProfileRecord


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one kind of instance; part of an `InstanceView` if its kind has been profiled."""

    profile: Profile
    ttft: TtftPredictor
    steps: StepModel
    # Fitted to samples; derived from the step times if there were too few samples.
    qoe: QoeModel

    @staticmethod
    def of_profile(profile: Profile, step_tokens: int) -> Measured:
        """Return what profiling an instance would give that has exactly this profile."""
        return Measured(
            profile,
            TtftPredictor.of_profile(profile, step_tokens),
            StepModel.of_profile(profile, step_tokens),
            QoeModel.of_profile(profile),
        )

    @staticmethod
    def of(record: ProfileRecord) -> Measured:
        """Create it from the record in etcd."""
        curve = record.ttft
        return Measured(
            record.profile,
            TtftPredictor(curve.base_s, curve.per_token_s, curve.per_token_squared_s),
            StepModel.of_profile(record.profile, record.step_tokens),
            QoeModel.of_profile(record.profile) if record.qoe is None else QoeModel(record.qoe.d),
        )
