"""What was measured of an instance, in the forms in which policies ask for it."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.perf.qoe_model import QoeModel
from tailrace.perf.steps import StepModel
from tailrace.perf.ttft import TtftPredictor
from tailrace.profiles import Profile
from tailrace.records import ProfileRecord


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one kind of instance; stands in an `InstanceView` where its kind has been profiled."""

    profile: Profile
    ttft: TtftPredictor
    steps: StepModel
    # Fitted to samples; where there were too few, what follows from the step times.
    qoe: QoeModel

    @staticmethod
    def of(record: ProfileRecord) -> Measured:
        """From what is in etcd."""
        curve = record.ttft
        return Measured(
            record.profile,
            TtftPredictor(curve.base_s, curve.per_token_s, curve.per_token_squared_s),
            StepModel.of_profile(record.profile, record.step_tokens),
            QoeModel.of_profile(record.profile) if record.qoe is None else QoeModel(record.qoe.d),
        )
