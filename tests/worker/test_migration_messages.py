"""Messages about a paused request survive a round trip."""

from __future__ import annotations

import pytest

from tailrace.v1 import worker_pb2
from worker_agent.migration.export_call import pause_of


@pytest.mark.parametrize("predicted", [None, 0.0, 123.5])
def test_predicted_length_survives_a_round_trip(predicted: float | None) -> None:
    paused = worker_pb2.ExportPaused(computed_tokens=7, predicted_remaining_tokens=predicted)
    received = worker_pb2.ExportPaused.FromString(paused.SerializeToString())
    assert pause_of(received).predicted_remaining_tokens == predicted
