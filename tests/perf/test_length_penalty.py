"""Length penalties: the built-in data and the shape of the factor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from simulator.steptime import StepTime
from tailrace.perf.length_penalty import (
    FittedLengthPenalty,
    LengthPenaltyError,
    TowardsLongest,
    built_in_penalties,
    load_length_penalty,
)
from tailrace.profiles import load_profile


def load(name: str) -> FittedLengthPenalty:
    penalty = load_length_penalty(name)
    assert penalty is not None
    return penalty


FITTED = [name for name in built_in_penalties() if name != "none"]


def batch(*lengths: int) -> NDArray[np.int64]:
    return np.array(lengths, np.int64)


def factor(penalty: FittedLengthPenalty, lengths: NDArray[np.int64]) -> float:
    """Return the product of both factors, of which only one exceeds 1."""
    return penalty.attention_factor(lengths) * penalty.step_factor(lengths)


def test_the_name_none_means_no_penalty() -> None:
    assert "none" in built_in_penalties()
    assert load_length_penalty("none") is None


@pytest.mark.parametrize("name", FITTED)
def test_every_penalty_states_its_source(name: str) -> None:
    penalty = load(name)
    assert penalty.name == name
    assert len(penalty.source) > 100 and penalty.licence


@pytest.mark.parametrize("name", FITTED)
@given(lengths=st.lists(st.integers(1, 200_000), min_size=1, max_size=600))
def test_the_factor_is_bounded_by_the_figures_maximum(name: str, lengths: list[int]) -> None:
    value = factor(load(name), batch(*lengths))
    assert 1.0 <= value <= 2.1 + 1e-9


@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("size", [1, 2, 32, 600])
def test_equal_lengths_have_no_penalty(name: str, size: int) -> None:
    assert factor(load(name), batch(*[777] * size)) == 1.0


@pytest.mark.parametrize("name", FITTED)
def test_the_penalty_increases_with_the_spread_of_lengths(name: str) -> None:
    penalty = load(name)
    total = 64 * 1_000
    factors = []
    for longest in (1_000, 2_000, 4_000, 8_000):
        others = (total - 4 * longest) // 60
        factors.append(factor(penalty, batch(*[longest] * 4, *[others] * 60)))
    assert factors == sorted(factors) and factors[0] < factors[-1]


def test_figure_2_spans_the_papers_range_at_a_batch_of_512() -> None:
    penalty = load("cascadeinfer-figure-2")
    mild = batch(*[1_100] * 256, *[900] * 256)
    one_long = batch(100_000, *[100] * 511)
    assert penalty.attention_factor(mild) == pytest.approx(1.1, abs=0.01)
    assert penalty.attention_factor(one_long) == pytest.approx(2.1, abs=0.01)


def test_weights_are_interpolated_between_batch_sizes() -> None:
    shape = TowardsLongest(batch_sizes=(4, 16), weights=(0.1, 0.3), most=3.0)
    assert shape.factor(2, 100.0, 200.0) == pytest.approx(1.1)
    assert shape.factor(4, 100.0, 200.0) == pytest.approx(1.1)
    assert shape.factor(8, 100.0, 200.0) == pytest.approx(1.2)
    assert shape.factor(99, 100.0, 200.0) == pytest.approx(1.3)
    assert shape.factor(16, 100.0, 1_000.0) == pytest.approx(1.6)


def test_the_factor_applies_to_the_kv_part_of_a_step() -> None:
    profile = load_profile("llama-3.2-3b-h100")
    penalty = load("cascadeinfer-figure-2")
    lengths = batch(*[4_000] * 8, *[500] * 56)
    kv_tokens = int(lengths.sum())
    plain, _ = StepTime(profile, None).run(0.0, 64, kv_tokens, lambda: lengths)
    slowed, _ = StepTime(profile, penalty).run(0.0, 64, kv_tokens, lambda: lengths)
    kv_s = profile.decode.ms_per_kv_token * kv_tokens / 1e3
    assert slowed - plain == pytest.approx((penalty.attention_factor(lengths) - 1) * kv_s)


def test_errors_name_the_penalty(tmp_path: Path) -> None:
    with pytest.raises(LengthPenaltyError, match=r"no-such.*measured-rtx4090"):
        load_length_penalty("no-such")
    bad = tmp_path / "bad.json"
    bad.write_text('{"name": "bad"}')
    with pytest.raises(LengthPenaltyError, match=r"bad\.json"):
        load_length_penalty(str(bad))
    bad.write_text(
        '{"name": "bad", "applies_to": "step", "source": "", "licence": "",'
        ' "shape": {"type": "towards_longest", "batch_sizes": [4, 2], "weights": [0.1, 0.2], "most": 2.0}}'
    )
    with pytest.raises(LengthPenaltyError, match="ascend"):
        load_length_penalty(str(bad))
