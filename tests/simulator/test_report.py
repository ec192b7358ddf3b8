"""Reports: a single file, well-formed pictures and correct numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from simulator.cli.compare import group_table
from simulator.comparison import Comparison, Plan, compare
from simulator.figure_text import half_text, mean_text
from simulator.records import MigrationOutcome, StageChange
from simulator.report.charts import linear, logarithmic, tick_text, within
from simulator.report.over_time import stages
from simulator.report.page import Cell, cards, table
from simulator.report.run import run_report
from simulator.report.side_by_side import comparison_report
from simulator.scenario import Detail, Scenario, ScenarioResult, SimulatedFleet, run_scenario
from simulator.workloads.resolve import WorkloadOptions
from tailrace.cluster import Stage
from tailrace.slo import Slo
from tests.simulator.command_lines import profile


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> SimulatedFleet:
    """Return a fleet of three small instances."""
    return SimulatedFleet(str(profile(tmp_path_factory.mktemp("report"))), 3)


def _outcome(policy: str, fleet: SimulatedFleet) -> ScenarioResult:
    options = WorkloadOptions(rate_per_s=9.0, count=60, max_model_len=1_500)
    return run_scenario(Scenario(policy, "sharegpt,reasoning_phase", options, fleet, Slo()))


@cache
def _detail(outcome_of: tuple[str, SimulatedFleet]) -> tuple[ScenarioResult, Detail]:
    outcome = _outcome(*outcome_of)
    assert outcome.detail is not None
    return outcome, outcome.detail


def _pictures(html: str) -> dict[str, ElementTree.Element]:
    """Return the SVG pictures by label."""
    found = {}
    for text in re.findall(r"<svg .*?</svg>", html, re.DOTALL):
        picture = ElementTree.fromstring(text)
        label = picture.get("aria-label")
        if label:
            found[label] = picture
    return found


def _titles(picture: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in picture.iter("title")]


@pytest.mark.parametrize("policy", ["pascal", "arrow", "cascade", "ares"])
def test_a_run_is_one_file_without_scripts(policy: str, fleet: SimulatedFleet) -> None:
    html = run_report(_outcome(policy, fleet))
    assert "<script" not in html
    assert not re.search(r"(src|href)=|url\(|@import", html)
    assert _pictures(html)


def test_the_page_contains_the_figures(fleet: SimulatedFleet) -> None:
    outcome, _ = _detail(("pascal", fleet))
    html = run_report(outcome)
    figures = outcome.figures
    assert f"<b>{figures.attainment:.1%}</b>" in html
    assert f"<td>{figures.finished}</td>" in html
    assert f"<td>{figures.ttft_p99_s:.3g} s</td>" in html


def test_kv_use_over_time(fleet: SimulatedFleet) -> None:
    outcome, detail = _detail(("pascal", fleet))
    picture = _pictures(run_report(outcome))["KV use over time"]
    titles = _titles(picture)
    assert {title.split(":")[0] for title in titles} == set(detail.series.instance_ids)
    # The spans of an instance cover the whole time axis.
    widths = [float(rect.get("width", 0)) for rect in picture.iter("rect")]
    assert sum(widths) == pytest.approx(3 * (842 - 74), abs=0.1 * len(widths))
    share = float(detail.series.kv_used_tokens.max()) / detail.kv_capacity_tokens
    assert f"the fullest reached {share:.0%}" in run_report(outcome)


def test_pools_are_drawn_only_if_there_are_pools(fleet: SimulatedFleet) -> None:
    outcome, detail = _detail(("arrow", fleet))
    titles = _titles(_pictures(run_report(outcome))["pools over time"])
    assert len(titles) == len(detail.series.pools)
    assert any(title.startswith("i000: prefill from 0 to") for title in titles)
    assert "pools over time" not in _pictures(run_report(_outcome("pascal", fleet)))


def test_stages_are_drawn_only_if_there_are_stages(fleet: SimulatedFleet) -> None:
    _, detail = _detail(("pascal", fleet))
    assert stages(detail) == ""
    first = (Stage(0, 500, ("i000",)), Stage(500, 2_000, ("i001", "i002")))
    second = (Stage(0, 700, ("i000",)), Stage(700, 2_000, ("i001", "i002")))
    changes = (StageChange(0.0, ()), StageChange(1.0, first), StageChange(3.0, second))
    staged = replace(detail, series=replace(detail.series, stages=changes), end_s=5.0)
    assert _titles(_pictures(stages(staged))["length stages over time"]) == [
        "0 to 500 tokens: i000 from 1 s",
        "500 to 2,000 tokens: i001, i002 from 1 s",
        "0 to 700 tokens: i000 from 3 s",
        "700 to 2,000 tokens: i001, i002 from 3 s",
    ]


def test_migrations_over_time_add_up(fleet: SimulatedFleet) -> None:
    outcome, detail = _detail(("arrow", fleet))
    html = run_report(outcome)
    titles = _titles(_pictures(html)["migrations over time"])
    counted = sum(int(re.findall(r": (\d+) from", title)[0]) for title in titles)
    committed = [m for m in detail.migrations if m.outcome is MigrationOutcome.COMMITTED]
    assert counted == len(committed) == outcome.figures.migrations > 0
    assert f"<td>prefill done</td><td>{len(detail.migrations)}</td><td>{len(committed)}</td>" in html


def test_tail_by_reasoning_length(fleet: SimulatedFleet) -> None:
    outcome, _ = _detail(("pascal", fleet))
    titles = _titles(_pictures(run_report(outcome))["tail TTFT by reasoning length"])
    reasoning = [(length, ttft) for length, _, ttft in outcome.points if 256 <= length < 512]
    # With fewer than ten values, the tail is the maximum.
    assert 5 <= len(reasoning) < 10
    longest = max(ttft for _, ttft in reasoning)
    assert f"pascal: 384 → {longest:.4g}" in titles


@pytest.fixture(scope="module")
def comparison(fleet: SimulatedFleet) -> Comparison:
    """Return a comparison of two policies at two rates."""
    options = WorkloadOptions(count=20, max_model_len=1_500)
    plan = Plan(["pascal", "arrow"], ["sharegpt"], [4.0, 8.0], [0, 1], options, fleet, Slo(0.3, 0.02))
    return compare(plan, processes=1)


def test_a_comparison_draws_attainment_against_rate(comparison: Comparison) -> None:
    pictures = _pictures(comparison_report(comparison))
    titles = _titles(pictures["SLO attainment (%) against rate"])
    for group in comparison.groups:
        for cell in group.cells:
            value = cell.estimate("attainment")
            expected = f"{cell.policy}: {cell.rate:g} → {100 * value.mean:.4g}"
            assert any(title.startswith(expected) for title in titles), (expected, titles)


def test_a_comparison_shows_each_policy_over_time(comparison: Comparison) -> None:
    html = comparison_report(comparison)
    for policy in ("pascal", "arrow"):
        assert f"<h3>{policy} over time at 8/s, seed 0</h3>" in html
    # Only outcomes that are drawn keep their details.
    for group in comparison.groups:
        for cell in group.cells:
            for seed, outcome in enumerate(cell.outcomes):
                assert (outcome.detail is not None) == (group.rate == 8.0 and seed == 0)


@pytest.mark.parametrize("width", [240, 120, 80, 60])
def test_a_table_fits_the_terminal(comparison: Comparison, width: int) -> None:
    group = comparison.groups[0]
    table, left_out = group_table(group, width)
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(table)
    text = captured.get()
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    # Wide terminals show all columns; SLO attainment, goodput and tail are always shown.
    assert bool(left_out) == (width < 100)
    for name in ("attainment", "goodput_per_s", "ttft_p99_s"):
        for cell in group.cells:
            assert mean_text(name, cell.estimate(name)) in text
            assert half_text(name, cell.estimate(name)) in text


def test_workload_files_are_named_without_their_folder() -> None:
    scenario = Scenario("pascal", "azure:/a/b/c.csv, r1", WorkloadOptions(), SimulatedFleet("p", 1), Slo())
    assert scenario.workload_name == "azure:c.csv, r1"


def test_text_is_escaped() -> None:
    assert "&lt;b&gt;" in cards([("what", "<b>")])
    assert "&lt;i&gt;" in table(["<i>"], [[Cell("a & b")]])
    assert "a &amp; b" in table(["<i>"], [[Cell("a & b")]])


@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=5))
def test_axes_cover_their_values(values: list[float]) -> None:
    for scale in (linear(values, 0.0, 100.0), logarithmic(values, 0.0, 100.0)):
        assert scale.low <= min(values) * (1 + 1e-9)
        assert scale.high >= max(values) * (1 - 1e-9)
        ticks = scale.ticks()
        assert ticks == sorted(set(ticks))
        assert 1 <= len(ticks) <= 14
        assert all(-1e-6 <= scale.place(tick) <= 100.0 + 1e-6 for tick in ticks)


def test_axes_without_values() -> None:
    assert (linear([], 0.0, 1.0).low, linear([], 0.0, 1.0).high) == (0.0, 1.0)
    assert (logarithmic([0.0], 0.0, 1.0).low, logarithmic([0.0], 0.0, 1.0).high) == (1.0, 10.0)
    assert within(2.0, 2.0, 0.0, 1.0).high == 3.0


@pytest.mark.parametrize(
    ("value", "text"), [(0.25, "0.25"), (1500.0, "1,500"), (20000.0, "20k"), (3e6, "3M"), (0.0, "0")]
)
def test_tick_text(value: float, text: str) -> None:
    assert tick_text(value) == text
