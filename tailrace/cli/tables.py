"""The tables of `tailrace get`: one `View` per kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from rich.cells import cell_len

from tailrace.bounded import printable
from tailrace.cli.output import full_width
from tailrace.cli.plain import enum_word
from tailrace.v1.admin_pb2 import InstanceInfo, PolicyInfo, RequestInfo, ServiceInfo
from tailrace.v1.migration_pb2 import MigrationRecord
from tailrace.v1.profile_pb2 import MeasuredProfile
from tailrace.v1.types_pb2 import (
    WAY_REPLAY,
    InstanceState,
    MigrationState,
    Phase,
    Pool,
    RequestState,
    Stage,
    Way,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

RowT = TypeVar("RowT", bound=Message)

NOTHING = "-"
REQUEST: Final = "REQUEST"
"""Heading of ids of requests."""
SHRINKING: Final[Mapping[str, int]] = {REQUEST: 16}
"""Columns that give way in a narrow live view: 16 characters tell most ids apart."""


@dataclass(frozen=True)
class Column(Generic[RowT]):
    """A heading and a function from a row to its text; figures are right-aligned."""

    heading: str
    text: Callable[[RowT], str]
    figure: bool = False
    # Whether the text may have several lines.
    lines: bool = False
    # What a table shows instead of the text.
    drawn: Callable[[RowT], RenderableType] | None = None


@dataclass(frozen=True)
class View(Generic[RowT]):
    """A table of one kind. `name` is also its key in the JSON object; `empty`: caption without rows; `more`:
    further columns of -o wide."""

    name: str
    columns: Sequence[Column[RowT]]
    empty: str
    more: Sequence[Column[RowT]] = ()

    def some(self, *headings: str) -> list[Column[RowT]]:
        """Return its columns with these headings."""
        columns = {column.heading: column for column in self.columns}
        return [columns[heading] for heading in headings]

    def wide(self) -> View[RowT]:
        """Return the view with all columns."""
        return replace(self, columns=(*self.columns, *self.more), more=())

    def table(self, rows: Iterable[RowT]) -> Table:
        """Return a table of the rows in the given order."""
        # Imported here, since -o json needs no table.
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in self.columns:
            table.add_column(column.heading, justify="right" if column.figure else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(_cell(column, row) for column in self.columns))
        if not table.rows:
            table.caption = self.empty
            table.caption_justify = "left"
        return full_width(table)


def _cell(column: Column[RowT], row: RowT) -> RenderableType:
    """Return what is shown of a row, if a text, one that acts on no terminal."""
    if column.drawn is not None:
        return column.drawn(row)
    text = column.text(row)
    return "\n".join(map(printable, text.split("\n"))) if column.lines else printable(text)


def _words(enum: EnumDescriptor) -> Callable[[int], str]:
    """Return what tells the name of a value of the enum, or a dash."""
    return lambda value: enum_word(enum, value) or NOTHING


pool_word = _words(Pool.DESCRIPTOR)
phase_word = _words(Phase.DESCRIPTOR)
migration_word = _words(MigrationState.DESCRIPTOR)
way_word = _words(Way.DESCRIPTOR)
instance_word = _words(InstanceState.DESCRIPTOR)
request_word = _words(RequestState.DESCRIPTOR)


def bytes_text(count: int) -> str:
    """Format a number of bytes with a binary unit."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def copied_text(record: MigrationRecord) -> str:
    """Describe how a request's KV got to its target: rounds and bytes, and what was there before."""
    if record.way == WAY_REPLAY:
        return f"by replay ({record.way_reason})"
    held = f" ({bytes_text(record.held_bytes)} there already)" if record.held_bytes else ""
    number = len(record.rounds)
    return f"{number} round{'' if number == 1 else 's'}, {bytes_text(record.bytes)}{held}"


def share_text(part: int, whole: int) -> str:
    """Format a share in percent; a dash if `whole` is 0."""
    return f"{100 * part / whole:.0f}%" if whole else NOTHING


def cached_text(instance: InstanceInfo) -> str:
    """Format the cached blocks: on the device, and after a plus in host memory."""
    host = instance.cached_host_blocks
    return f"{instance.cached_blocks}+{host}" if host else str(instance.cached_blocks)


def _optional(request: RequestInfo, field: str, form: str) -> str:
    """Format a figure that the worker may not have; a dash if so."""
    return format(getattr(request, field), form) if request.HasField(field) else NOTHING  # type: ignore[arg-type]


INSTANCES = View[InstanceInfo](
    name="instances",
    columns=(
        Column("INSTANCE", lambda i: i.instance_id),
        Column("STATE", lambda i: instance_word(i.state)),
        Column("POOL", lambda i: pool_word(i.pool)),
        Column("RUN", lambda i: str(i.running), figure=True),
        Column("WAIT", lambda i: str(i.waiting), figure=True),
        Column("PREFILL", lambda i: str(i.prefilling), figure=True),
        Column("REASON", lambda i: str(i.reasoning), figure=True),
        Column("ANSWER", lambda i: str(i.answering), figure=True),
        Column("KV BLOCKS", lambda i: f"{i.kv_blocks_used}/{i.kv_blocks_total}", figure=True),
        Column("MS/TOKEN", lambda i: f"{i.token_interval_ms:.1f}", figure=True),
        Column("CACHED", cached_text, figure=True),
        Column("HITS", lambda i: share_text(i.cached_prompt_tokens, i.prompt_tokens), figure=True),
        Column("IN", lambda i: str(i.migrations_in), figure=True),
        Column("OUT", lambda i: str(i.migrations_out), figure=True),
        Column("REPORT", lambda i: f"{i.report_age_s:.1f} s ago", figure=True),
        Column("MOVES", lambda i: way_word(i.way)),
        Column("ENGINE", lambda i: i.engine),
        Column("ADDRESS", lambda i: i.address),
    ),
    more=(
        Column("MODEL", lambda i: i.model),
        Column("TP", lambda i: str(i.tensor_parallel_size or 1), figure=True),
        Column("PP", lambda i: str(i.pipeline_parallel_size or 1), figure=True),
        Column("GENERATED", lambda i: str(i.generated_tokens), figure=True),
        Column("PREEMPTED", lambda i: str(i.preemptions), figure=True),
        Column("METRICS", lambda i: i.metrics_address or NOTHING),
        Column("INCARNATION", lambda i: i.incarnation),
        Column("WHY NOT LIVE", lambda i: i.way_reason or NOTHING),
    ),
    empty="no instances",
)

POOLS = View[InstanceInfo](
    name="pools",
    columns=(
        Column("INSTANCE", lambda i: i.instance_id),
        Column("POOL", lambda i: pool_word(i.pool)),
    ),
    empty="no instances",
)

REQUESTS = View[RequestInfo](
    name="requests",
    columns=(
        Column(REQUEST, lambda r: r.request_id),
        Column("INSTANCE", lambda r: r.instance_id),
        Column("PHASE", lambda r: phase_word(r.phase)),
        Column("STATE", lambda r: "migrating" if r.migrating else request_word(r.state)),
        Column("EPOCH", lambda r: str(r.epoch), figure=True),
        Column("PROMPT", lambda r: str(r.prompt_tokens), figure=True),
        Column("OUTPUT", lambda r: str(r.output_tokens), figure=True),
        Column("REASONING", lambda r: str(r.reasoning_tokens), figure=True),
        Column("MAX", lambda r: str(r.max_tokens), figure=True),
        Column("KV BLOCKS", lambda r: str(r.kv_blocks), figure=True),
        Column("MS/TOKEN", lambda r: f"{r.token_interval_ms:.1f}", figure=True),
        Column("AGE", lambda r: f"{r.age_s:.1f} s", figure=True),
    ),
    more=(
        Column("FRONT END", lambda r: r.frontend_id),
        Column("SLACK", lambda r: _optional(r, "pacer_slack_tokens", ".1f"), figure=True),
        Column("QOE", lambda r: _optional(r, "qoe", ".2f"), figure=True),
        Column("PREDICTED", lambda r: _optional(r, "predicted_remaining_tokens", ".0f"), figure=True),
        Column("DEMOTED", lambda r: "demoted" if r.demoted else ""),
    ),
    empty="no requests are running",
)

MIGRATIONS = View[MigrationRecord](
    name="migrations",
    columns=(
        Column("MIGRATION", lambda m: m.migration_id),
        Column(REQUEST, lambda m: m.request_id),
        Column("FROM", lambda m: m.source_instance_id),
        Column("TO", lambda m: m.target_instance_id),
        Column("STATE", lambda m: migration_word(m.state)),
        Column("WAY", lambda m: way_word(m.way)),
        Column("PHASE", lambda m: phase_word(m.phase)),
        Column("EPOCH", lambda m: str(m.epoch), figure=True),
        Column("ROUNDS", lambda m: str(len(m.rounds)), figure=True),
        Column("BYTES", lambda m: bytes_text(m.bytes), figure=True),
        Column("PAUSE MS", lambda m: f"{m.pause_ms:.1f}", figure=True),
        Column("PAUSE STEPS", lambda m: f"{m.pause_steps:.1f}", figure=True),
        Column("REASON", lambda m: m.error or m.reason or NOTHING),
    ),
    more=(
        Column("POLICY", lambda m: m.policy or NOTHING),
        Column("TOKENS", lambda m: str(m.tokens), figure=True),
        Column("STEP WAIT MS", lambda m: f"{m.step_wait_ms:.1f}", figure=True),
        Column("WHY NOT LIVE", lambda m: m.way_reason or NOTHING),
    ),
    empty="no migrations yet",
)


def _what_it_does(policy: PolicyInfo) -> str:
    """Return the policy's summary; of a suspended policy why it does nothing."""
    if policy.suspended:
        return f"suspended, least_loaded decides: {policy.suspended}"
    return policy.summary


POLICIES = View[PolicyInfo](
    name="policies",
    columns=(
        Column("POLICY", lambda p: p.name),
        Column("ACTIVE", lambda p: "suspended" if p.suspended else "active" if p.active else ""),
        Column("ORDER", lambda p: p.batch_order),
        # One per line, to leave room for the other columns.
        Column(
            "PARAMETERS",
            lambda p: "\n".join(f"{x.name}={x.value}" for x in p.parameters if x.value),
            lines=True,
        ),
        Column("WHAT IT DOES", _what_it_does),
    ),
    empty="no policies are installed",
)

PROFILES = View[MeasuredProfile](
    name="profiles",
    columns=(
        Column("KIND", lambda p: p.kind),
        Column("MEASURED ON", lambda p: p.instance_id),
        Column("AT", lambda p: time.strftime("%Y-%m-%d %H:%M", time.localtime(p.measured_s))),
        Column("PREFILL 1K MS", lambda p: f"{_prefill_ms(p, 1024):.1f}", figure=True),
        Column("R2", lambda p: f"{p.ttft.r_squared:.3f}", figure=True),
        Column("DECODE MS", lambda p: f"{p.decode.base_ms + p.decode.ms_per_request:.2f}", figure=True),
        Column("MS/REQUEST", lambda p: f"{p.decode.ms_per_request:.4f}", figure=True),
        Column("MS/1K KV", lambda p: f"{p.decode.ms_per_kv_token * 1024:.4f}", figure=True),
        Column("ERROR", lambda p: f"{p.decode.error:.1%}", figure=True),
        Column("MAX RUNNING", lambda p: f"{p.max_running_tokens} at {p.tpot_s:g} s", figure=True),
        Column("QOE ERROR", lambda p: f"{p.qoe.error:.1%}" if p.HasField("qoe") else NOTHING, figure=True),
    ),
    empty="nothing was measured (tailrace profile)",
)


def _prefill_ms(profile: MeasuredProfile, tokens: int) -> float:
    curve = profile.ttft
    return 1e3 * (curve.base_s + (curve.s_per_token + curve.s_per_token_squared * tokens) * tokens)


STAGES = View[Stage](
    name="stages",
    columns=(
        Column("FROM", lambda s: str(s.lo), figure=True),
        Column("BELOW", lambda s: str(s.hi), figure=True),
        Column("INSTANCES", lambda s: ", ".join(s.instance_ids) or NOTHING),
    ),
    empty="no stages are set",
)

SERVICES = View[ServiceInfo](
    name="services",
    columns=(
        Column("SERVICE", lambda s: s.kind),
        Column("ID", lambda s: s.id),
        Column("LEADER", lambda s: "leader" if s.leader else ""),
        Column("ADDRESS", lambda s: s.address),
        Column("HTTP", lambda s: (s.http_address or NOTHING) + (" (asleep)" if s.asleep else "")),
        Column("METRICS", lambda s: s.metrics_address or NOTHING),
    ),
    empty="no services are registered",
)


def lines(view: View[RowT], chunks: Iterable[Sequence[RowT]]) -> Iterator[str]:
    """Yield the table's lines as rows arrive, laid out as rich lays out `view.table`, without trailing
    spaces; rich renders a table as a whole, half a millisecond per row.

    A column is as wide as its widest cell so far: of one chunk, all cells are known before the first is
    written.
    """
    headings = [column.heading for column in view.columns]
    widths = [cell_len(heading) for heading in headings]
    started = False
    for chunk in chunks:
        rows = [[printable(column.text(row)) for column in view.columns] for row in chunk]
        for row in rows:
            widths = [max(width, cell_len(cell)) for width, cell in zip(widths, row, strict=True)]
        if not started:
            yield _line(view, headings, widths)
            started = True
        for row in rows:
            yield _line(view, row, widths)


def _line(view: View[RowT], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        " " * (width - cell_len(cell)) + cell if column.figure else cell + " " * (width - cell_len(cell))
        for column, cell, width in zip(view.columns, cells, widths, strict=True)
    )
    return "  ".join(padded).rstrip()
