"""What a source says of a paused request arrives as it was."""

from __future__ import annotations

import pytest

from tailrace.v1 import worker_pb2
from worker_agent.migration.messages import pause_of


@pytest.mark.parametrize("predicted", [None, 0.0, 123.5])
def test_a_predicted_length_travels_and_none_stays_none(predicted: float | None) -> None:
    paused = worker_pb2.ExportPaused(computed_tokens=7, predicted_remaining_tokens=predicted)
    received = worker_pb2.ExportPaused.FromString(paused.SerializeToString())
    assert pause_of(received).predicted_remaining_tokens == predicted
