"""The requests of a worker's report by column: one array per property instead of one message per request.

A protobuf message costs a Python object when it is read, which for all requests of a large fleet costs more
than everything else that is done with them. Workers of earlier versions report rows; `columns_of` is the one
place that reads both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from tailrace.v1 import monitor_pb2

T = TypeVar("T")

ABSENT: Final = math.nan
"""Stands for the absent value of an optional property in a column."""


def columns_of(report: monitor_pb2.WorkerReport) -> monitor_pb2.RequestColumns:
    """Return the requests of a steady report by column, whichever way it has them."""
    if report.requests and not report.HasField("request_columns"):
        return columns_from(report.requests)
    return report.request_columns


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


def rows_from(columns: monitor_pb2.RequestColumns) -> list[monitor_pb2.RequestReport]:
    """Convert columns to rows, in the same order, for readers of earlier versions."""
    count = len(columns.request_ids)
    traceparents = traceparents_of(columns)
    names = list(columns.frontend_ids)
    return [
        monitor_pb2.RequestReport(
            request_id=request_id,
            frontend_id=names[frontend] if frontend < len(names) else "",
            epoch=epoch,
            phase=phase,
            state=state,
            prompt_tokens=prompt,
            output_tokens=output,
            reasoning_tokens=reasoning,
            max_tokens=most,
            kv_blocks=blocks,
            arrival_s=arrival_s,
            token_interval_ms=interval_ms,
            pacer_slack_tokens=_known(slack),
            qoe=_known(qoe),
            phase_tokens=phase_tokens,
            demoted=demoted,
            predicted_remaining_tokens=_known(predicted),
            traceparent=traceparents.get(request_id, ""),
            host_kv_blocks=host_blocks,
        )
        for (
            request_id,
            frontend,
            epoch,
            phase,
            state,
            prompt,
            output,
            reasoning,
            most,
            blocks,
            arrival_s,
            interval_ms,
            slack,
            qoe,
            phase_tokens,
            demoted,
            predicted,
            host_blocks,
        ) in zip(
            columns.request_ids,
            full(columns.frontends, count, 0),
            full(columns.epochs, count, 0),
            full(columns.phases, count, 0),
            full(columns.states, count, 0),
            full(columns.prompt_tokens, count, 0),
            full(columns.output_tokens, count, 0),
            full(columns.reasoning_tokens, count, 0),
            full(columns.max_tokens, count, 0),
            full(columns.kv_blocks, count, 0),
            full(columns.arrival_s, count, 0.0),
            full(columns.token_interval_ms, count, 0.0),
            full(columns.pacer_slack_tokens, count, ABSENT),
            full(columns.qoe, count, ABSENT),
            full(columns.phase_tokens, count, 0),
            full(columns.demoted, count, False),
            full(columns.predicted_remaining_tokens, count, ABSENT),
            full(columns.host_kv_blocks, count, 0),
            strict=True,
        )
    ]


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


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _unless_default(column: list[T]) -> list[T]:
    """Return the column; empty if all values are the default, which the encoding leaves out."""
    return column if any(column) else []


def _unless_absent(column: list[float]) -> list[float]:
    return [] if all(map(math.isnan, column)) else column
