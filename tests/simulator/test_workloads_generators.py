"""Generators reproduce the published statistics, and equal seeds give equal requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.workloads import ares, mixes, pascal, r1
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.base import WorkloadError
from simulator.workloads.generators import GENERATORS
from simulator.workloads.lengths import DrawLengths, Lengths, QuantileTable, Tokens

DRAWS = 100_000
moderate = settings(max_examples=30, deadline=None, derandomize=True)


def sample_lengths(draw: DrawLengths) -> Lengths:
    return draw(DRAWS, np.random.default_rng(7))


def percentiles(values: Tokens, *shares: float) -> list[float]:
    return [float(value) for value in np.percentile(values, shares)]


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_requests_are_in_order_and_depend_only_on_the_seed(name: str) -> None:
    requests = GENERATORS[name].requests(500, 2.0, seed=3)
    assert requests == GENERATORS[name].requests(500, 2.0, seed=3)
    assert requests != GENERATORS[name].requests(500, 2.0, seed=4)
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    assert len({r.request_id for r in requests}) == 500
    assert max(r.prompt_tokens + r.output_tokens for r in requests) <= 131_072


def test_a_higher_rate_gives_the_same_requests_at_shorter_intervals() -> None:
    slow = poisson_requests("r1", r1.lengths, 200, 1.0, seed=1)
    fast = poisson_requests("r1", r1.lengths, 200, 4.0, seed=1)
    assert [r.output_tokens for r in slow] == [r.output_tokens for r in fast]
    assert [r.arrival_s for r in fast] == pytest.approx([r.arrival_s / 4.0 for r in slow])


def test_arrivals_are_poisson() -> None:
    times = np.array([r.arrival_s for r in poisson_requests("r1", r1.lengths, 20_000, 5.0, seed=2)])
    between = np.diff(times)
    assert between.mean() == pytest.approx(0.2, rel=0.03)
    assert between.std() / between.mean() == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["r1", "plain_mix"])
def test_invalid_rates_are_errors(name: str, rate: float) -> None:
    with pytest.raises(WorkloadError, match="rate must be"):
        GENERATORS[name].requests(5, rate, seed=0)


def test_the_plain_mix_has_its_documented_statistics() -> None:
    lengths = sample_lengths(mixes.plain_mix)
    assert lengths.prompt.mean() == pytest.approx(2_000, rel=0.02)
    assert percentiles(lengths.prompt, 95) == pytest.approx([5_000], rel=0.02)
    assert lengths.answer.mean() == pytest.approx(780, rel=0.02)
    assert percentiles(lengths.answer, 50, 95, 99) == pytest.approx([470, 2_060, 2_540], rel=0.02)
    assert not lengths.reasoning.any()
    between = np.diff([r.arrival_s for r in GENERATORS["plain_mix"].requests(20_000, 5.0, seed=2)])
    assert between.mean() == pytest.approx(0.2, rel=0.03)
    assert between.std() / between.mean() == pytest.approx(2.0, rel=0.03)


# ARES, table 2 and section 2: (mean, sd, P50, P90, P95).
@pytest.mark.parametrize(
    ("table", "published"),
    [
        (ares.SHAREGPT.prompt, (305, 1053, 36, 920, 1609)),
        (ares.SHAREGPT.output, (7542, 12008, 1536, 32670, 32679)),
        (ares.ALPACA.prompt, (11, 4, 10, 15, 18)),
        (ares.ALPACA.output, (8596, 13354, 987, 32690, 32691)),
    ],
    ids=["sharegpt prompt", "sharegpt output", "alpaca prompt", "alpaca output"],
)
def test_quantile_tables_match_table_2_of_ares(table: QuantileTable, published: tuple[float, ...]) -> None:
    mean, deviation, *quantiles = published
    # The published values are rounded to whole tokens.
    assert table.mean() == pytest.approx(mean, rel=0.005, abs=0.51)
    assert table.deviation() == pytest.approx(deviation, rel=0.005, abs=0.51)
    assert table.at(np.array([0.5, 0.9, 0.95])) == pytest.approx(quantiles)


def test_shares_of_short_and_long_outputs_match_ares() -> None:
    output = sample_lengths(ares.SHAREGPT).answer
    assert (output < 1_000).mean() == pytest.approx(0.292, abs=0.005)
    assert (output > 30_000).mean() == pytest.approx(0.173, abs=0.005)
    assert (output > 25_000).mean() > 0.15
    assert percentiles(output, 50, 90, 95) == pytest.approx([1536, 32670, 32679], rel=0.02)


def test_r1_has_the_distribution_of_servegen() -> None:
    # The expected values were sampled from all of ServeGen's per-client histograms.
    lengths = sample_lengths(r1.lengths)
    assert percentiles(lengths.reasoning, 50, 95, 99) == pytest.approx([477, 4_726, 11_307], rel=0.1)
    assert lengths.reasoning.mean() == pytest.approx(1_139, rel=0.05)
    assert (lengths.reasoning < 1_000).mean() == pytest.approx(0.758, abs=0.01)
    assert (lengths.reasoning > 5_000).mean() == pytest.approx(0.046, abs=0.005)
    assert percentiles(lengths.answer, 50, 95) == pytest.approx([209, 1_184], rel=0.1)
    assert lengths.answer.mean() == pytest.approx(394, rel=0.1)


@pytest.mark.parametrize("draw", [pascal.alpaca_eval, pascal.arena_hard])
def test_most_reasoning_is_shorter_than_1000_tokens_as_in_pascal(draw: DrawLengths) -> None:
    reasoning = sample_lengths(draw).reasoning
    assert 0.70 < (reasoning < 1_000).mean() < 0.80


def test_reasoning_is_8_48_times_the_answer_as_in_pascal() -> None:
    lengths = sample_lengths(pascal.live_code_bench)
    assert lengths.reasoning.mean() / lengths.answer.mean() == pytest.approx(8.48, rel=0.02)


@moderate
@given(
    values=st.lists(st.floats(0.5, 1e6), min_size=2, max_size=8).map(sorted),
    at=st.floats(0.0, 1.0),
)
def test_interpolated_quantiles_are_monotonic(values: list[float], at: float) -> None:
    shares = tuple(float(share) for share in np.linspace(0.0, 1.0, len(values)))
    table = QuantileTable(shares, tuple(values))
    assert table.at(np.array(shares)) == pytest.approx(values)
    below, here = table.at(np.array([at * 0.9, at]))
    assert below <= here * (1 + 1e-9)
    # The closed-form mean is compared with a sum over many slices.
    middles = (np.arange(5_000) + 0.5) / 5_000
    assert table.mean() == pytest.approx(float(table.at(middles).mean()), rel=1e-3)


@pytest.mark.parametrize(
    ("shares", "values"),
    [((0.0, 1.0), (1.0,)), ((0.1, 1.0), (1.0, 2.0)), ((0.0, 1.0), (2.0, 1.0)), ((0.0, 1.0), (0.0, 1.0))],
)
def test_invalid_quantile_tables_are_errors(shares: tuple[float, ...], values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        QuantileTable(shares, values)
