"""Format the figures of a run, and what was simulated, for tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from simulator.estimate import Estimate
from simulator.scenario import Figures, Scenario, SimulatedFleet, kinds_of
from simulator.setups import Setup
from tailrace.intra.registry import intra_needs
from tailrace.policy.deployment import Fact
from tailrace.policy.parameters import Value, format_value

NOTHING: Final = "-"


@dataclass(frozen=True, slots=True)
class FigureFormat:
    """How a figure is displayed: its heading with the unit, and the factor by which it is multiplied."""

    heading: str
    factor: float = 1.0


# Least number of significant digits; no digit before the decimal point is dropped.
_DIGITS: Final = 3

FIGURE_FORMATS: Final[Mapping[str, FigureFormat]] = {
    "attainment": FigureFormat("SLO %", 100.0),
    "goodput_per_s": FigureFormat("GOODPUT/S"),
    "ttft_p50_s": FigureFormat("TTFT P50 S"),
    "ttft_p99_s": FigureFormat("TTFT P99 S"),
    "tpot_p50_s": FigureFormat("TPOT P50 MS", 1e3),
    "tpot_p99_s": FigureFormat("TPOT P99 MS", 1e3),
    "latency_p50_s": FigureFormat("E2E P50 S"),
    "latency_p99_s": FigureFormat("E2E P99 S"),
    "tokens_per_s": FigureFormat("TOKENS/S"),
}


def mean_text(figure: str, value: Estimate) -> str:
    """Format the mean of a figure."""
    form = FIGURE_FORMATS[figure]
    mean = value.mean * form.factor
    return f"{mean:,.{_decimals(mean)}f}" if math.isfinite(mean) else NOTHING


def half_text(figure: str, value: Estimate) -> str:
    """Format half of the confidence interval with the decimals of the mean; "" for a single run."""
    form = FIGURE_FORMATS[figure]
    if value.half_width is None or not math.isfinite(value.half_width):
        return ""
    places = _decimals(value.mean * form.factor)
    return f"±{value.half_width * form.factor:,.{places}f}"


def _decimals(value: float) -> int:
    """Return the decimals that display the significant digits."""
    if not math.isfinite(value) or value == 0.0:
        return _DIGITS - 1
    return max(0, _DIGITS - 1 - math.floor(math.log10(abs(value))))


def summary_rows(figures: Figures) -> list[tuple[str, str]]:
    """Return rows of (label, value with its unit)."""
    cached = f"{100 * figures.cached_share:.1f}%"
    if figures.loaded_share:
        cached += f", of which {100 * figures.loaded_share:.1f} points from host memory"
    rows = [
        ("Requests", f"{figures.requests} at {_rate(figures.rate_per_s)}/s"),
        ("Finished", f"{figures.finished}"),
        ("Refused", f"{figures.refused}"),
        ("SLO attainment", f"{figures.attainment:.1%}"),
        ("Goodput", f"{_rate(figures.goodput_per_s)} requests/s"),
        ("TTFT P50", _seconds(figures.ttft_p50_s)),
        ("TTFT P99", _seconds(figures.ttft_p99_s)),
        ("TPOT P50", _milliseconds(figures.tpot_p50_s)),
        ("TPOT P99", _milliseconds(figures.tpot_p99_s)),
        ("QoE, mean", f"{figures.qoe_mean:.3f}" if math.isfinite(figures.qoe_mean) else "-"),
        ("End to end P50", _seconds(figures.latency_p50_s)),
        ("End to end P99", _seconds(figures.latency_p99_s)),
        ("Throughput", f"{figures.tokens_per_s:,.0f} tokens/s"),
        ("Migrations", f"{figures.migrations}, {figures.migrated_bytes / 1024**3:.1f} GiB"),
        ("Longest pause by a migration", _milliseconds(figures.pause_max_s)),
        ("Prompt tokens cached", cached),
        ("Preemptions", f"{figures.swapped} swapped, {figures.recomputed} recomputed"),
    ]
    if figures.pool_changes:
        rows.append(("Pool changes", f"{figures.pool_changes}"))
    if figures.stage_changes:
        rows.append(("Stage changes", f"{figures.stage_changes}"))
    return rows


def _rate(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else NOTHING


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if math.isfinite(value) else "-"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if math.isfinite(value) else "-"


def describe_fleet(scenario: Scenario) -> str:
    """Describe the fleet in a phrase."""
    return f"· {describe_instances(scenario.fleet)}"


def describe_instances(fleet: SimulatedFleet) -> str:
    """Describe the number and kind of the instances."""
    kinds = kinds_of(fleet.profile, fleet.instances)
    return ", ".join(f"{count} instance{'' if count == 1 else 's'} of {name}" for name, count in kinds)


def setup_rows(scenario: Scenario) -> list[tuple[str, str]]:
    """Return (setting, value) rows of the policy's setup and the fleet."""
    setup, fleet = scenario.setup(), scenario.fleet
    share = setup.prefill_share
    rows = [
        ("Policy", scenario.policy),
        ("Parameters", format_parameters(scenario.parameters) or "defaults"),
        ("Order inside an instance", setup.intra_name),
        ("Pools at the start", "none" if share is None else f"{share:.0%} of the instances prefill"),
        ("A migration's target is full", setup.migration.when_full.value),
        ("Predictions of output lengths", setup.predicts),
        ("Instances", describe_instances(fleet)),
        ("Cost of unequal lengths", fleet.penalty),
        ("Seed", f"{scenario.options.seed}"),
    ]
    return rows


# What a policy or an order may know of the SLOs.
_SLO_FACTS: Final[Mapping[Fact, str]] = {
    Fact.TTFT_SLO: "TTFT",
    Fact.TPOT_SLO: "TPOT",
    Fact.QOE_SLO: "QoE",
    Fact.PACE: "pace",
}


def knowledge_line(setup: Setup) -> str:
    """Return the batch order of a policy, its parameters, and what it knows of the SLOs, in one line."""
    known = [
        f"{where} ({', '.join(facts)})"
        for where, needs in (("placement", setup.kind.needs), ("order", intra_needs(setup.intra_name)))
        if (facts := [word for fact, word in _SLO_FACTS.items() if fact in needs])
    ]
    parts = [
        f"order {setup.intra_name}",
        f"SLOs known to {' and '.join(known)}" if known else "no SLO known",
        format_parameters(setup.assigned.items()),
    ]
    return f"{setup.name}: {'; '.join(part for part in parts if part)}"


def format_parameters(parameters: Iterable[tuple[str, Value]]) -> str:
    """Format parameters as `--set` accepts them."""
    return ", ".join(f"{name}={format_value(value)}" for name, value in parameters)
