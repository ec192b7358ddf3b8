"""The closed form of the pacer equals a computation token by token, and the integral of the curves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.qoe import TokenPacer, TokenRun, qoe, slack_tokens

PACE = 0.1


@st.composite
def streams(draw: st.DrawFn) -> list[TokenRun]:
    runs = []
    now = draw(st.floats(0.0, 5.0))
    for _ in range(draw(st.integers(1, 6))):
        run = TokenRun(
            now, draw(st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.11, 0.3, 1.0])), draw(st.integers(1, 40))
        )
        runs.append(run)
        now = run.first_s + run.interval_s * (run.count - 1) + draw(st.floats(0.001, 4.0))
    return runs


def ready(runs: list[TokenRun]) -> list[float]:
    return [run.first_s + run.interval_s * n for run in runs for n in range(run.count)]


def digested(times: list[float]) -> list[float]:
    out: list[float] = []
    for time in times:
        out.append(max(time, out[-1] + PACE) if out else time)
    return out


@given(runs=streams(), early_s=st.sampled_from([None, 0.0, 0.7]))
def test_qoe_equals_the_integral_of_the_curves(runs: list[TokenRun], early_s: float | None) -> None:
    shown = digested(ready(runs))
    start = shown[0] - (early_s or 0.0)
    end = shown[-1]
    expected = [start + PACE * n for n in range(len(shown))]
    # Step functions are integrated exactly between their steps.
    steps = np.unique(np.array([start, *shown, *(e for e in expected if e < end), end]))
    middles = (steps[:-1] + steps[1:]) / 2
    widths = np.diff(steps)

    def area(curve: list[float]) -> float:
        return float((np.searchsorted(np.array(curve), middles, "right") * widths).sum())

    wanted = area(shown) / area(expected) if area(expected) > 0 else 1.0
    got = qoe(runs, PACE, None if early_s is None else start)
    assert got == pytest.approx(wanted, abs=1e-6)
    assert 0.0 <= got <= 1.0


@given(runs=streams())
def test_the_pacer_ends_when_the_last_token_is_read(runs: list[TokenRun]) -> None:
    pacer = TokenPacer(PACE)
    for run in runs:
        pacer.add(run)
    assert pacer.digested_until_s == pytest.approx(digested(ready(runs))[-1], abs=1e-9)
    assert pacer.ready == sum(run.count for run in runs)


def test_splitting_a_run_does_not_change_qoe() -> None:
    whole = [TokenRun(1.0, 0.13, 100)]
    parts = [TokenRun(1.0 + 0.13 * n, 0.13, 10) for n in range(0, 100, 10)]
    assert qoe(whole, PACE) == pytest.approx(qoe(parts, PACE))


def test_a_stream_at_reading_speed_has_perfect_qoe() -> None:
    assert qoe([TokenRun(3.0, PACE, 50)], PACE) == pytest.approx(1.0)
    assert qoe([TokenRun(3.0, 0.01, 1)], PACE) == 1.0
    assert qoe([], PACE) == 1.0


def test_buffered_tokens_bridge_a_pause() -> None:
    # 50 tokens in half a second are 5 s of reading: a pause of 4 s goes unnoticed, one of 10 s does not.
    store = TokenRun(0.0, 0.01, 50)
    assert qoe([store, TokenRun(4.5, 0.01, 50)], PACE) == pytest.approx(1.0)
    assert qoe([store, TokenRun(10.5, 0.01, 50)], PACE) < 0.95


def test_slack_is_the_number_of_tokens_ahead() -> None:
    pacer = TokenPacer(PACE)
    assert pacer.slack_tokens(1.0) == 0.0
    pacer.add(TokenRun(2.0, 0.05, 21))
    assert pacer.slack_tokens(3.0) == pytest.approx(10.0)
    assert pacer.slack_tokens(5.0) == pytest.approx(-10.0)
    assert slack_tokens(1, 0.0, PACE) == 0.0


def test_a_pace_must_be_positive() -> None:
    with pytest.raises(ValueError, match="pace"):
        TokenPacer(0.0)
