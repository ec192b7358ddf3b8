"""The requests of a worker's report by column: one array per property instead of one message per request.

A protobuf message costs a Python object when it is read, which for all requests of a large fleet costs more
than everything else that is done with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from tailrace.v1 import monitor_pb2

T = TypeVar("T")

ABSENT: Final = math.nan
"""Stands for the absent value of an optional property in a column."""


def full(column: Sequence[T], count: int, default: T) -> list[T]:
    """Return the `count` values of a column; those that it lacks are the default."""
    values = list(column[:])
    if len(values) != count:
        values = (values + [default] * count)[:count]
    return values


def value_of(column: Sequence[T], row: int, default: T) -> T:
    """Return the value of one request; the default if the column lacks it."""
    return column[row] if row < len(column) else default


def optional_of(column: Sequence[float], row: int) -> float | None:
    """Return the value of one request in an optional column; None: absent."""
    value = column[row] if row < len(column) else ABSENT
    return None if value != value else value


def columns_from(rows: Iterable[monitor_pb2.RequestReport]) -> monitor_pb2.RequestColumns:
    """Convert rows to columns, in the same order."""
    rows = list(rows)
    frontends = {name: index for index, name in enumerate(dict.fromkeys(row.frontend_id for row in rows))}
    traced = [index for index, row in enumerate(rows) if row.traceparent]
    return monitor_pb2.RequestColumns(
        request_ids=[row.request_id for row in rows],
        frontend_ids=frontends,
        frontends=_unless_default([frontends[row.frontend_id] for row in rows]),
        epochs=_unless_default([row.epoch for row in rows]),
        phases=_unless_default([row.phase for row in rows]),
        states=_unless_default([row.state for row in rows]),
        prompt_tokens=_unless_default([row.prompt_tokens for row in rows]),
        output_tokens=_unless_default([row.output_tokens for row in rows]),
        reasoning_tokens=_unless_default([row.reasoning_tokens for row in rows]),
        max_tokens=_unless_default([row.max_tokens for row in rows]),
        kv_blocks=_unless_default([row.kv_blocks for row in rows]),
        arrival_s=_unless_default([row.arrival_s for row in rows]),
        token_interval_ms=_unless_default([row.token_interval_ms for row in rows]),
        pacer_slack_tokens=_unless_absent(
            [row.pacer_slack_tokens if row.HasField("pacer_slack_tokens") else ABSENT for row in rows]
        ),
        qoe=_unless_absent([row.qoe if row.HasField("qoe") else ABSENT for row in rows]),
        phase_tokens=_unless_default([row.phase_tokens for row in rows]),
        demoted=_unless_default([row.demoted for row in rows]),
        predicted_remaining_tokens=_unless_absent(
            [
                row.predicted_remaining_tokens if row.HasField("predicted_remaining_tokens") else ABSENT
                for row in rows
            ]
        ),
        host_kv_blocks=_unless_default([row.host_kv_blocks for row in rows]),
        traced=traced,
        traceparents=[rows[index].traceparent for index in traced],
    )


_OPTIONAL: Final = frozenset(
    field.name for field in monitor_pb2.RequestReport.DESCRIPTOR.fields if field.has_presence
)
_NOT_BY_REQUEST: Final = frozenset({"frontend_ids", "traced", "traceparents"})


def picked(columns: monitor_pb2.RequestColumns, rows: Sequence[int]) -> monitor_pb2.RequestColumns:
    """Return the requests of these rows, in their order."""
    position = {row: number for number, row in enumerate(rows)}
    traced = {
        position[row]: traceparent
        for row, traceparent in zip(columns.traced, columns.traceparents, strict=False)
        if row in position
    }
    kept = monitor_pb2.RequestColumns(
        frontend_ids=columns.frontend_ids, traced=traced, traceparents=traced.values()
    )
    for field, column in columns.ListFields():
        if field.name not in _NOT_BY_REQUEST:
            default = ABSENT if field.name in _OPTIONAL else 0
            getattr(kept, field.name).extend(value_of(column, row, default) for row in rows)
    return kept


def traceparents_of(columns: monitor_pb2.RequestColumns) -> dict[str, str]:
    """Return the trace contexts of the requests that are traced, by request id."""
    if not columns.traced:
        return {}
    ids = columns.request_ids
    return {
        ids[row]: traceparent
        for row, traceparent in zip(columns.traced, columns.traceparents, strict=False)
        if row < len(ids)
    }


def _unless_default(column: list[T]) -> list[T]:
    """Return the column; empty if all values are the default, which the encoding leaves out."""
    return column if any(column) else []


def _unless_absent(column: list[float]) -> list[float]:
    return [] if all(map(math.isnan, column)) else column
