"""Print the comparison as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from experiments.live.simulated.compare import Row
from experiments.live.simulated.figures import Spread
from experiments.live.simulated.scheduler_cost import SchedulerCost
from experiments.live.simulated.slices import Slice

_VERDICTS: Final = {True: "yes", False: "no", None: "machine too slow"}


def print_slice(trace_slice: Slice, console: Console) -> None:
    """Describe the slice that is replayed."""
    shape = trace_slice.shape
    console.print(
        f"{trace_slice.trace}: {len(trace_slice.requests)} requests at {trace_slice.rate_per_s:.3g}/s, "
        f"{trace_slice.output_tokens:,} output tokens, load {trace_slice.load:.0%}; "
        f"{shape.workers} instances of {shape.seats} seats and "
        f"{shape.max_model_len:,} KV tokens, {shape.profile} x{shape.speed:g}, {shape.prefill_instances} "
        f"prefill instances if there are pools; seed {trace_slice.seed}"
    )


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Print latencies, decisions and the state of the machine."""
    table = Table(title="Live / simulated: mean, P50, P99 (1.00 = equal)")
    table.add_column("trace", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for heading in ("speed", "lost", "TTFT", "TPOT", "end to end", "within 15%", "of sim. range"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        verdicts = [_VERDICTS[verdict] for verdict in (row.within, row.within_range)]
        ratios = [_format_ratio(row.ratios[name]) for name in ("ttft", "tpot", "latency")]
        table.add_row(row.trace, row.policy, f"x{row.speed:g}", str(row.live.lost), *ratios, *verdicts)
    console.print(table)
    table = Table(title="Decisions: live and simulated (two simulations with other report times)")
    table.add_column("trace", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for heading in ("same instance", "distributed differently", "preempted", "migrations, live", "simulated"):
        table.add_column(heading, justify="right", no_wrap=not heading.startswith(("migr", "simu")))
    for row in rows:
        first = row.simulated[0]
        table.add_row(
            row.trace,
            row.policy,
            f"{row.same_instance:.0%} ({row.same_instance_simulated:.0%})",
            f"{row.moved_share:.1%} ({row.moved_share_simulated:.1%})",
            f"{row.live.outcome.preemptions} : {first.preemptions}",
            _reasons(row.live.outcome.migrations),
            _reasons(first.migrations),
        )
    console.print(table)
    table = Table(title="The machine, and measured delays of the control plane")
    table.add_column("trace", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    headings = ("steps late P50", "P99", "arrivals late P99", "cores busy", "report", "open", "commit")
    for heading in (*headings, "placement P50", "P99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        machine, delays, placed = row.live.machine, row.live.delays, row.live.placements
        late = (machine.step_late_p50_s, machine.step_late_p99_s, machine.arrival_late_p99_s)
        table.add_row(
            row.trace,
            row.policy,
            *(_ms(value) for value in late),
            f"{sum(machine.busy.values()):.2f}",
            *(_ms(value) for value in (delays.report_s, delays.open_s, delays.commit_s)),
            *(_ms(value) for value in (placed.added_p50_s, placed.added_p99_s)),
        )
    console.print(table)


def print_costs(costs: Sequence[SchedulerCost], console: Console) -> None:
    """Print the scheduler's cost."""
    table = Table(title="Scheduler: added latency and CPU per placement")
    table.add_column("policy", no_wrap=True)
    headings = ("workers", "placements", "added P50", "added P99", "policy P50", "policy P99")
    for heading in (*headings, "CPU ms per placement", "idle CPU", "tick"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cost in costs:
        latency = cost.latency
        table.add_row(
            cost.policy,
            str(cost.workers),
            f"{cost.placements} at {cost.rate_per_s:g}/s",
            _ms(latency.added_p50_s),
            _ms(latency.added_p99_s),
            _ms(latency.decided_p50_s),
            _ms(latency.decided_p99_s),
            f"{cost.cpu_s_per_1000:.2f}" + ("" if cost.kept_up else " (machine too slow)"),
            f"{cost.idle_cpu_s_per_s:.2%}",
            _ms(cost.tick_s),
        )
    console.print(table)


def _format_ratio(ratio: Spread) -> str:
    return " ".join("-" if math.isnan(each) else f"{each:.2f}" for each in ratio)


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.3g} ms"


def _reasons(migrations: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(migrations.items())) or "-"
