"""R5 to R8: SLO-aware scheduling against minimal load and round robin on static pools (section 7.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from experiments.claims.arrow.cluster import (
    CODE,
    CONVERSATION,
    MINIMAL_LOAD,
    ROUND_ROBIN,
    SLO_AWARE,
    Trace,
)
from experiments.claims.arrow.not_checked import without_traces
from experiments.claims.arrow.rates import sustainable
from experiments.claims.base import WHOLE, Claim, Effort, Experiment, Figures, Finding, Run, Verdict
from experiments.claims.verdicts import (
    format_estimate,
    judge_effect,
    judged,
    means_of,
    number,
    numbers,
    spreads_of,
)
from simulator.estimate import estimate

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


# Starting points in the trace, each of which is a separate sample.
STARTS: Final = (0.0, 1 / 3, 2 / 3)


def ablation(traces: Path | None, effort: Effort = WHOLE) -> tuple[Experiment, ...]:
    """Return one experiment per trace: three schedulers, each bisected for its sustainable rate."""
    return (
        _of_trace("arrow-code", traces, effort, CODE, R5, 1.67, R6, 0.043, 16.0),
        _of_trace("arrow-conversation", traces, effort, CONVERSATION, R7, 1.1, R8, 0.024, 50.0),
    )


def _of_trace(
    name: str,
    traces: Path | None,
    effort: Effort,
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
    # The whole trace, even in a quick check: a third of it does not build up the same queues.
    starts = STARTS if effort is WHOLE else STARTS[:1]
    runs = tuple(
        Run(
            run_name(name, policy, start),
            sustainable,
            (str(traces), trace, policy, start),
            cost_s,
        )
        for policy in (SLO_AWARE, MINIMAL_LOAD, ROUND_ROBIN)
        for start in starts
    )
    return Experiment(name, claims, runs, judge(name, starts, rate, rate_ratio, balance, balance_gain))


def run_name(name: str, policy: str, start: float) -> str:
    """Return the name of a run, the key of its figures."""
    return f"{name}/{policy}/{start:.2f}"


def judge(
    name: str, starts: Sequence[float], rate: Claim, rate_ratio: float, balance: Claim, balance_gain: float
) -> Callable[[Mapping[str, Figures]], Sequence[Finding]]:
    """Return a judge over all runs of one trace."""
    return partial(_judge, name, starts, rate, rate_ratio, balance, balance_gain)


def _judge(
    name: str,
    starts: Sequence[float],
    rate: Claim,
    rate_ratio: float,
    balance: Claim,
    balance_gain: float,
    figures: Mapping[str, Figures],
) -> Sequence[Finding]:
    def runs(policy: str) -> list[Figures]:
        return [figures[run_name(name, policy, start)] for start in starts]

    return (
        *judged((rate,), _rates, rate, rate_ratio, runs),
        *judged((balance,), _balance, balance, balance_gain, runs),
    )


def _rates(claim: Claim, paper: float, runs: Callable[[str], list[Figures]]) -> Finding:
    slo_aware, minimal_load = runs(SLO_AWARE), runs(MINIMAL_LOAD)
    rates = {
        policy: estimate([number(run, "sustainable_per_s") for run in runs(policy)])
        for policy in (SLO_AWARE, MINIMAL_LOAD, ROUND_ROBIN)
    }
    ratio = estimate(
        [
            number(ours, "sustainable_per_s") / number(base, "sustainable_per_s")
            for ours, base in zip(slo_aware, minimal_load, strict=True)
        ]
    )
    decoders = [n for run in slo_aware for n in numbers(run, "decoders")]
    kept = min(attained for run in slo_aware for attained in numbers(run, "tpot_attainments"))
    found = {"ratio": ratio, **{f"{policy}_per_s": e for policy, e in rates.items()}}
    return Finding(
        claim.claim_id,
        f"{format_estimate(ratio, '.2f')}x ({rates[SLO_AWARE].mean:.0f} against "
        f"{rates[MINIMAL_LOAD].mean:.0f} req/s)",
        judge_effect(ratio.mean - 1.0, paper - 1.0),
        f"{min(decoders):.0f} to {max(decoders):.0f} instances decode at the end, 4 of 8 at the start; "
        f"at least {kept:.1%} of all requests meet their TPOT at every rate tried: TTFT decides",
        means_of(found) | _curves("slo_aware", slo_aware) | _curves("minimal_load", minimal_load),
        spreads_of(found),
    )


def _balance(claim: Claim, paper: float, runs: Callable[[str], list[Figures]]) -> Finding:
    minimal_load, round_robin = runs(MINIMAL_LOAD), runs(ROUND_ROBIN)
    gains = [gains_at(one, other) for one, other in zip(minimal_load, round_robin, strict=True)]
    largest = estimate([max(gain.values(), default=0.0) for gain in gains])
    smallest = estimate([min(gain.values(), default=0.0) for gain in gains])
    # A maximum of differences is above zero by chance alone.
    significant = largest.half_width is None or largest.mean > largest.half_width
    balanced = {"gain": largest, "least_gain": smallest}
    return Finding(
        claim.claim_id,
        f"{format_estimate(largest, '+.1%')} at most, {smallest.mean:+.1%} at least",
        judge_effect(largest.mean, paper) if significant else Verdict.DOES_NOT_HOLD,
        "the largest and the smallest difference over the rates tried with both"
        + ("" if significant else "; the starting point in the trace has a larger effect"),
        means_of(balanced) | _curves("minimal_load", minimal_load) | _curves("round_robin", round_robin),
        spreads_of(balanced),
    )


def gains_at(one: Figures, other: Figures) -> dict[float, float]:
    """Return the attainment of the first run less that of the second, at each rate that both have."""
    mine, theirs = (
        dict(zip(numbers(run, "rates_per_s"), numbers(run, "attainments"), strict=True))
        for run in (one, other)
    )
    return {rate: attained - theirs[rate] for rate, attained in mine.items() if rate in theirs}


def _curves(name: str, runs: Sequence[Figures]) -> dict[str, Sequence[float]]:
    """Return every list of every run, numbered by starting point."""
    return {
        f"{name}.{n}.{key}": numbers(run, key)
        for n, run in enumerate(runs)
        for key in run
        if not isinstance(run[key], int | float)
    }
