"""R5 to R8: SLO-aware scheduling against minimal load and round robin on static pools (section 7.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from simulator.claims.arrow.cluster import (
    CODE,
    CONVERSATION,
    MINIMAL_LOAD,
    ROUND_ROBIN,
    SLO_AWARE,
    Trace,
)
from simulator.claims.arrow.missing import without_traces
from simulator.claims.arrow.rates import sustainable
from simulator.claims.base import Claim, Experiment, Figures, Finding, Run
from simulator.claims.figures import number, numbers
from simulator.claims.verdicts import of_effect

_PAPER: Final = "Arrow"

R5 = Claim("R5", _PAPER, "Fig. 8", "Azure Code: rate at 90% attainment, SLO Aware over Minimal Load", "1.67x")
R6 = Claim("R6", _PAPER, "Fig. 8", "Azure Code: attainment, Minimal Load over Round Robin", "up to +4.3%")
R7 = Claim(
    "R7",
    _PAPER,
    "Fig. 8",
    "Azure Conversation: rate at 90% attainment, SLO Aware over Minimal Load",
    "1.1x",
)
R8 = Claim(
    "R8", _PAPER, "Fig. 8", "Azure Conversation: attainment, Minimal Load over Round Robin", "up to +2.4%"
)


def ablation(traces: Path | None) -> tuple[Experiment, ...]:
    """One experiment a trace: three schedulers, each bisected for the rate that it sustains."""
    return (
        _of_trace("arrow-code", traces, CODE, R5, 1.67, R6, 0.043, 50.0),
        _of_trace("arrow-conversation", traces, CONVERSATION, R7, 1.1, R8, 0.024, 90.0),
    )


def _of_trace(
    name: str,
    traces: Path | None,
    trace: Trace,
    rate: Claim,
    rate_ratio: float,
    balance: Claim,
    balance_gain: float,
    cost_s: float,
) -> Experiment:
    claims = (rate, balance)
    if traces is None:
        return Experiment(name, claims, (), without_traces(claims))
    runs = tuple(
        Run(f"{name}/{policy}", sustainable, (str(traces), trace, policy), cost_s)
        for policy in (SLO_AWARE, MINIMAL_LOAD, ROUND_ROBIN)
    )
    return Experiment(name, claims, runs, judge(name, rate, rate_ratio, balance, balance_gain))


def judge(
    name: str, rate: Claim, rate_ratio: float, balance: Claim, balance_gain: float
) -> Callable[[Mapping[str, Figures]], Sequence[Finding]]:
    """A judge over the three runs of one trace."""
    return partial(_judge, name, rate, rate_ratio, balance, balance_gain)


def _judge(
    name: str,
    rate: Claim,
    rate_ratio: float,
    balance: Claim,
    balance_gain: float,
    figures: Mapping[str, Figures],
) -> Sequence[Finding]:
    aware, minimal, turning = (
        figures[f"{name}/{policy}"] for policy in (SLO_AWARE, MINIMAL_LOAD, ROUND_ROBIN)
    )
    ours, base = number(aware, "sustainable_per_s"), number(minimal, "sustainable_per_s")
    ratio = ours / base
    gain, at_per_s = greatest_gain(minimal, turning)
    decoders = numbers(aware, "decoders")
    return (
        Finding(
            rate.claim_id,
            f"{ratio:.2f}x ({ours:.0f} against {base:.0f} req/s)",
            of_effect(ratio - 1.0, rate_ratio - 1.0),
            f"{min(decoders):.0f} to {max(decoders):.0f} of 8 instances end up decoding, not 4; "
            f"TPOT is kept by {min(numbers(aware, 'tpot_attainments')):.1%} or more: prefill alone decides",
            {"ratio": ratio, **_prefixed("slo_aware", aware), **_prefixed("minimal_load", minimal)},
        ),
        Finding(
            balance.claim_id,
            f"{gain:+.1%} (at {at_per_s:.0f} req/s)",
            of_effect(gain, balance_gain),
            "greatest difference over the rates that both were tried at; turns let queues differ",
            {"gain": gain, "at_per_s": at_per_s, **_prefixed("round_robin", turning)},
        ),
    )


def greatest_gain(one: Figures, other: Figures) -> tuple[float, float]:
    """(greatest difference in attainment, its rate) over the rates that both have; (0, 0) for none."""
    mine = dict(zip(numbers(one, "rates_per_s"), numbers(one, "attainments"), strict=True))
    theirs = dict(zip(numbers(other, "rates_per_s"), numbers(other, "attainments"), strict=True))
    gains = [(mine[rate] - theirs[rate], rate) for rate in mine if rate in theirs]
    return max(gains, default=(0.0, 0.0))


def _prefixed(name: str, figures: Figures) -> dict[str, float | Sequence[float]]:
    return {f"{name}.{key}": value for key, value in figures.items()}
