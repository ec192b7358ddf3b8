"""`tailrace top`: a live overview of the fleet."""

from __future__ import annotations

import heapq
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import click
import grpc
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tailrace.cli.admin import CALL_TIMEOUT_S, Admin, admin_option, connect
from tailrace.cli.output import (
    Output,
    console,
    fit,
    output_option,
    print_figures,
    print_json,
    require_terminal,
)
from tailrace.cli.plain import JsonValue, to_plain, to_plain_list
from tailrace.cli.tables import (
    INSTANCES,
    MIGRATIONS,
    NOTHING,
    REQUEST,
    REQUESTS,
    SHRINKING,
    Column,
    View,
)
from tailrace.v1.admin_pb2 import (
    InstanceInfo,
    ListInstancesRequest,
    ListRequestsRequest,
    RecentFigures,
    RequestInfo,
    RequestOrder,
)
from tailrace.v1.migration_pb2 import MigrationRecord

_INTERVAL_S: Final = 1.0
_RATE_WINDOW: Final = 5
"""Number of samples over which the token rate is computed."""
_INSTANCES_MAX: Final = 32
_OLDEST: Final = ListRequestsRequest(order=RequestOrder.REQUEST_ORDER_OLDEST, page_size=20)
_MIGRATIONS_MAX: Final = 5
_BAR_WIDTH: Final = 20
_ID_WIDTH: Final = 28
_SHRINKING: Final = {**SHRINKING, "MIGRATION OF": SHRINKING[REQUEST], "KV": 2}


_QUIT: Final = "q"
_SORT: Final = "s"


def _kv_share(instance: InstanceInfo) -> float:
    return instance.kv_blocks_used / max(1, instance.kv_blocks_total)


def _kv_bar(instance: InstanceInfo) -> ProgressBar:
    return ProgressBar(total=1.0, completed=_kv_share(instance), width=_BAR_WIDTH)


def _missed(instance: InstanceInfo) -> float:
    """Return the share of the last minute's answers that missed an SLO."""
    return 1.0 - instance.recent.slo_attainment if instance.recent.answers else 0.0


# Orders of instances, each by the largest first, of an instance and its tokens per second; None: as listed.
_ORDERS: Final[Mapping[str, Callable[[InstanceInfo, float], float] | None]] = {
    "name": None,
    "kv": lambda i, _: _kv_share(i),
    "running": lambda i, _: i.running,
    "waiting": lambda i, _: i.waiting,
    "ttft": lambda i, _: i.recent.ttft_ms_p99,
    "tpot": lambda i, _: i.recent.tpot_ms_p99,
    # The lowest attainment first.
    "slo": lambda i, _: _missed(i),
    "moves": lambda i, _: i.recent.moves_in + i.recent.moves_out,
    "tokens": lambda _, tokens_per_s: tokens_per_s,
}


@dataclass(frozen=True, slots=True)
class Sample:
    """The replies of the admin API at one time (`taken_s`: monotonic seconds)."""

    taken_s: float
    policy: str
    instances: tuple[InstanceInfo, ...]
    # The oldest, and how many there are in all.
    requests: tuple[RequestInfo, ...]
    requests_total: int
    migrations: tuple[MigrationRecord, ...]
    # Of the whole fleet.
    recent: RecentFigures


@click.command(epilog="Example: tailrace top --once")
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@click.option(
    "--sort", type=click.Choice(list(_ORDERS)), default="name", show_default=True, help="Order of instances."
)
@output_option()
@admin_option
def top(once: bool, sort: str, output: Output, admin: str | None) -> None:
    """Show instances, requests and recent migrations every second, until q or Ctrl-C; s changes the order.

    TTFT and TPOT (P50/P99), SLO attainment and moves (in/out) are of the last minute; -: no answers. Of a
    large fleet: the 32 instances that are first in the order (by name: with the most KV in use), and the 20
    oldest requests. With -o json: one object per refresh, with the same requests and migrations, and all
    instances.
    """
    if not once and output is not Output.JSON:
        require_terminal("--once prints one frame, -o json an object every second")
    with connect(admin) as connection, connection.errors():
        history: deque[Sample] = deque([_sample(connection)], maxlen=_RATE_WINDOW)
        if once and output is Output.JSON:
            print_json(figures(history))
        elif once:
            print_figures(frame(history, sort=sort))
        elif output is Output.JSON:
            _lines(connection, history)
        else:
            _live(connection, history, sort)


def _lines(admin: Admin, history: deque[Sample]) -> None:
    try:
        while True:
            print_json(figures(history))
            time.sleep(_INTERVAL_S)
            history.append(_sample(admin))
    except KeyboardInterrupt:
        return


def _live(admin: Admin, history: deque[Sample], sort: str) -> None:
    terminal = console()
    try:
        with (
            _reading_keys() as reading,
            Live(
                frame(history, terminal.width, sort),
                console=terminal,
                auto_refresh=False,
                screen=terminal.is_terminal,
            ) as live,
        ):
            due_s = time.monotonic() + _INTERVAL_S
            while (key := _key(reading, due_s)) != _QUIT:
                if key == _SORT:
                    sort = _next_order(sort)
                else:
                    history.append(_sample(admin))
                    due_s = time.monotonic() + _INTERVAL_S
                live.update(frame(history, terminal.width, sort), refresh=True)
    except KeyboardInterrupt:
        return


def _next_order(sort: str) -> str:
    orders = list(_ORDERS)
    return orders[(orders.index(sort) + 1) % len(orders)]


@contextmanager
def _reading_keys() -> Iterator[bool]:
    """Let keys be read as they are pressed, in the block; yield False if stdin is no terminal."""
    if not sys.stdin.isatty():
        yield False
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _key(reading: bool, until_s: float) -> str:
    """Return the key that is pressed by then, in lower case; "": none that means something."""
    while (left_s := until_s - time.monotonic()) > 0:
        if not reading:
            time.sleep(left_s)
        elif select.select([sys.stdin], [], [], left_s)[0]:
            # The end of the input is as good as q.
            key = os.read(sys.stdin.fileno(), 1).decode(errors="replace").lower() or _QUIT
            if key in (_QUIT, _SORT):
                return key
    return ""


def _sample(admin: Admin) -> Sample:
    stub = admin.stub
    oldest = stub.ListRequests(_OLDEST, timeout=CALL_TIMEOUT_S)
    fleet = stub.ListInstances(ListInstancesRequest(), timeout=CALL_TIMEOUT_S)
    return Sample(
        taken_s=time.monotonic(),
        policy=next((policy.name for policy in admin.policies() if policy.active), "-"),
        instances=tuple(fleet.instances),
        requests=tuple(oldest.requests),
        requests_total=oldest.total_size,
        migrations=_recent(admin),
        recent=fleet.recent,
    )


def _recent(admin: Admin) -> tuple[MigrationRecord, ...]:
    """Return the last migrations; none if no migration service responds, so that the rest is still shown."""
    try:
        return tuple(admin.migrations(_MIGRATIONS_MAX))
    except grpc.RpcError as error:
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE:
            return ()
        raise


def figures(history: deque[Sample]) -> dict[str, JsonValue]:
    """Return the last sample as JSON, with the rates that `frame` shows."""
    now, rates = history[-1], token_rates(history[0], history[-1])
    instances: list[JsonValue] = []
    for instance in now.instances:
        plain = to_plain(instance)
        plain["tokens_per_s"] = rates[instance.instance_id]
        instances.append(plain)
    return {
        "policy": now.policy,
        "tokens_per_s": sum(rates.values()),
        "recent": to_plain(now.recent),
        "instances": instances,
        "requests": to_plain_list(now.requests),
        "requests_total": now.requests_total,
        "migrations": to_plain_list(now.migrations),
    }


def frame(history: deque[Sample], width: int | None = None, sort: str = "name") -> RenderableType:
    """Render the last sample, to fit `width` if one is given; rates are over the whole history (at least one
    sample). `sort`: an order of instances."""
    now = history[-1]
    rates = token_rates(history[0], now)
    heading = Text.assemble(
        ("tailrace", "bold"),
        f"  policy {now.policy}  instances {len(now.instances)}  requests {now.requests_total}"
        f"  {sum(rates.values()):.0f} tokens/s",
    )
    tables = [
        _with_more(_instances(rates).table(_shown(now.instances, rates, sort)), len(now.instances)),
        _with_more(_REQUESTS.table(now.requests), now.requests_total),
        _RECENT_MIGRATIONS.table(now.migrations),
    ]
    if width is not None:
        for table in tables:
            fit(table, width, _SHRINKING)
    # A table without rows is only in the way.
    shown = [part for table in tables if table.row_count for part in (Text(), table)]
    return Group(heading, _last_minute(now.recent), *shown)


def _last_minute(recent: RecentFigures) -> Text:
    moves = f"  moves {recent.moves_in}"
    if not recent.answers:
        return Text(f"last minute: answers 0{moves}")
    return Text(
        f"last minute: answers {recent.answers}  SLO {_attainment(recent)}{moves}\n"
        f"P50/P99: TTFT {_ttft(recent)} ms  TPOT {_tpot(recent)} ms"
    )


def _ttft(recent: RecentFigures) -> str:
    return f"{recent.ttft_ms_p50:.0f}/{recent.ttft_ms_p99:.0f}" if recent.answers else NOTHING


def _tpot(recent: RecentFigures) -> str:
    return f"{recent.tpot_ms_p50:.1f}/{recent.tpot_ms_p99:.1f}" if recent.answers else NOTHING


def _attainment(recent: RecentFigures) -> str:
    return f"{100 * recent.slo_attainment:.0f}%" if recent.answers else NOTHING


def _moves(instance: InstanceInfo) -> str:
    return f"{instance.recent.moves_in}/{instance.recent.moves_out}"


def token_rates(first: Sample, last: Sample) -> dict[str, float]:
    """Return tokens per second by instance id, from the counters of two samples.

    A counter that decreased belongs to a restarted worker, and is counted from zero. With a single sample the
    rate is derived from the reported token interval and the number of decoding requests.
    """
    elapsed = last.taken_s - first.taken_s
    before = {instance.instance_id: instance for instance in first.instances}
    rates: dict[str, float] = {}
    for instance in last.instances:
        earlier = before.get(instance.instance_id)
        if elapsed <= 0 or earlier is None:
            decoding = instance.reasoning + instance.answering
            interval_s = instance.token_interval_ms / 1000
            rates[instance.instance_id] = decoding / interval_s if interval_s > 0 else 0.0
            continue
        restarted = instance.generated_tokens < earlier.generated_tokens
        since = 0 if restarted else earlier.generated_tokens
        rates[instance.instance_id] = (instance.generated_tokens - since) / elapsed
    return rates


def _instances(rates: Mapping[str, float]) -> View[InstanceInfo]:
    # The most asked for first: a narrow view leaves columns out from the right.
    columns = (
        *INSTANCES.some("INSTANCE", "STATE"),
        Column("KV", lambda i: "", drawn=_kv_bar),
        Column("", lambda i: f"{100 * _kv_share(i):.0f}%", figure=True),
        *INSTANCES.some("RUN", "WAIT"),
        Column("TTFT MS", lambda i: _ttft(i.recent), figure=True),
        Column("TPOT MS", lambda i: _tpot(i.recent), figure=True),
        Column("SLO", lambda i: _attainment(i.recent), figure=True),
        Column("MOVES", _moves, figure=True),
        Column("TOKENS/S", lambda i: f"{rates[i.instance_id]:.0f}", figure=True),
        *INSTANCES.some("MS/TOKEN", "POOL", "PREFILL", "REASON", "ANSWER"),
    )
    return replace(INSTANCES, columns=columns)


_REQUESTS: Final = replace(
    REQUESTS,
    columns=(
        Column(REQUEST, lambda r: _short(r.request_id)),
        Column("INSTANCE", lambda r: r.instance_id + (" moving" if r.migrating else "")),
        *REQUESTS.some("PHASE", "EPOCH", "PROMPT", "OUTPUT", "REASONING", "AGE"),
    ),
)
_RECENT_MIGRATIONS: Final = replace(
    MIGRATIONS,
    columns=(
        Column("MIGRATION OF", lambda m: _short(m.request_id)),
        *MIGRATIONS.some("FROM", "TO", "STATE", "ROUNDS", "BYTES", "PAUSE MS"),
        Column("STEPS", lambda m: f"{m.pause_steps:.1f}", figure=True),
    ),
)


def _shown(instances: Sequence[InstanceInfo], rates: dict[str, float], sort: str) -> list[InstanceInfo]:
    """Return as many instances as are shown, in this order; by name those with the most KV in use."""
    key = _ORDERS[sort]
    if key is not None:
        return heapq.nlargest(_INSTANCES_MAX, instances, key=lambda i: key(i, rates[i.instance_id]))
    places = range(len(instances))
    fullest = heapq.nlargest(_INSTANCES_MAX, places, key=lambda place: _kv_share(instances[place]))
    return [instances[place] for place in sorted(fullest)]


def _with_more(table: Table, total: int) -> Table:
    """Add a line that says how many rows are not shown."""
    if table.row_count < total:
        table.caption = f"and {total - table.row_count} more"
        table.caption_justify = "left"
    return table


def _short(request_id: str) -> str:
    return request_id if len(request_id) <= _ID_WIDTH else request_id[: _ID_WIDTH - 1] + "…"
