"""Check the numbers of a worker's report where it enters.

Decisions compare and divide by them. A worker with a fault, or of another version, may send one that is not
finite or absurd, and one NaN would win every comparison of a kind, or fail every one, for the whole fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from google.protobuf.message import Message

from tailrace.v1 import monitor_pb2

ROWS_MAX: Final = 65_536
"""Most requests, and most phase events, of one report: a hundred times those of a large instance."""
CACHED_MAX: Final = 1 << 20
"""Most blocks that one report may say a prefix cache has gained or lost."""


class TooManyRows(ValueError):
    """The report has more rows than can be applied while requests wait; the message names them."""


def check_size(report: monitor_pb2.WorkerReport) -> None:
    """Raise TooManyRows."""
    cached = sum(len(change.stored) + len(change.removed) for change in report.cache.changes)
    for what, count, most in (
        ("requests", len(report.requests.request_ids), ROWS_MAX),
        ("phase events", len(report.phase_events), ROWS_MAX),
        ("cached blocks", cached, CACHED_MAX),
    ):
        if count > most:
            raise TooManyRows(f"{count:,} {what}; at most {most:,} are read")


def clear_wrong_numbers(report: monitor_pb2.WorkerReport) -> list[str]:
    """Clear numbers that are not finite, too large, or negative where that means nothing, as if they had not
    been sent; return the names of their fields. A column with one is cleared whole."""
    cleared = _cleared(report, ("time_s",), _wrong)
    if report.HasField("load"):
        load = report.load
        cleared += _cleared(load, _LOAD, _wrong) + _cleared(load, _SIGNED_LOAD, _wrong_signed)
        cleared += _cleared_columns(load, ("future_load",), _wrong_column)
        columns = report.requests
        cleared += _cleared_columns(columns, _COLUMNS, _wrong_column)
        cleared += _cleared_columns(columns, _OPTIONAL_COLUMNS, _wrong_optional)
        cleared += _cleared_columns(columns, ("pacer_slack_tokens",), _wrong_signed_optional)
    for event in report.phase_events:
        cleared += _cleared(event, ("time_s", "predicted_remaining_tokens"), _wrong)
    return cleared


# Beyond any time, rate or length; small enough that sums, products and quotients of two stay finite.
_MOST: Final = 1e15
_LOAD: Final = (
    "token_interval_ms_mean",
    "token_interval_ms_p99",
    "prefill_delay_s",
    "migration_bytes_per_s",
)
# Of a fitted curve.
_SIGNED_LOAD: Final = ("prefill_s_per_token", "prefill_base_s", "prefill_s_per_token_squared")
_COLUMNS: Final = ("arrival_s", "token_interval_ms")
_OPTIONAL_COLUMNS: Final = ("qoe", "predicted_remaining_tokens")


def _cleared(message: Message, names: Sequence[str], is_wrong: Callable[[float], bool]) -> list[str]:
    wrong = [name for name in names if is_wrong(getattr(message, name))]
    for name in wrong:
        message.ClearField(name)
    return wrong


def _cleared_columns(
    message: Message, names: Sequence[str], is_wrong: Callable[[Sequence[float]], bool]
) -> list[str]:
    wrong = [name for name in names if (column := getattr(message, name)) and is_wrong(column[:])]
    for name in wrong:
        message.ClearField(name)
    return wrong


def _wrong(value: float) -> bool:
    return not 0.0 <= value <= _MOST


def _wrong_signed(value: float) -> bool:
    return not -_MOST <= value <= _MOST


def _wrong_column(values: Sequence[float]) -> bool:
    # The sum of numbers none of which is NaN is none either.
    return min(values) < 0.0 or not sum(values) <= _MOST


def _wrong_signed_optional(values: Sequence[float]) -> bool:
    # NaN: absent.
    return any(abs(value) > _MOST for value in values)


def _wrong_optional(values: Sequence[float]) -> bool:
    return any(value < 0.0 or value > _MOST for value in values)
