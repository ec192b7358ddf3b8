"""Messages about a paused request survive a round trip, and impossible ones are refused."""

from __future__ import annotations

import math

import pytest

from tailrace.v1 import worker_pb2
from worker_agent.migration.export_call import SourceLost, pause_of


@pytest.mark.parametrize("predicted", [None, 0.0, 123.5])
def test_predicted_length_survives_a_round_trip(predicted: float | None) -> None:
    paused = worker_pb2.ExportPaused(computed_tokens=7, predicted_remaining_tokens=predicted)
    received = worker_pb2.ExportPaused.FromString(paused.SerializeToString())
    assert pause_of(received).predicted_remaining_tokens == predicted


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.1, 1e300])
@pytest.mark.parametrize(
    "field",
    [
        "token_interval_ms",
        "predicted_remaining_tokens",
        "waited_s",
        "since_arrival_s",
        "answer_pace.since_first_s",
        "answer_pace.digested_s",
        "answer_pace.digested_sum_s",
    ],
)
def test_a_source_that_sends_no_number_is_lost(field: str, number: float) -> None:
    paused = worker_pb2.ExportPaused(computed_tokens=7, waited_s=0.5)
    paused.answer_pace.ready = 3
    assert pause_of(paused).waited_s == 0.5
    message, _, name = field.rpartition(".")
    setattr(getattr(paused, message) if message else paused, name, number)
    with pytest.raises(SourceLost, match=name):
        pause_of(paused)
