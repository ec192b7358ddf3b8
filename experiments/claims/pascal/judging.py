"""Judge PASCAL's rows from the figures of all runs; each function returns the finding of its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from experiments.claims.base import Claim, Finding, Verdict
from experiments.claims.pascal.results import ALPACA, ARENA, HIGH, LEVELS, LOADS, MIXED, Results
from experiments.claims.verdicts import (
    format_estimate,
    judge_bound,
    judge_effect,
    judge_ordering,
    judge_value,
    means_of,
    spreads_of,
    weakest,
)
from simulator.estimate import Estimate, estimate

# Difference below which violations of two schedulers count as equal: about the resolution of the runs.
_COMPARABLE: Final = 0.001
# First bin of "long reasoning": where PASCAL demotes.
_LONG_TOKENS: Final = 5_000 // 256 * 256
_BASELINES: Final = ("fcfs", "rr")


def judge_gain(claim: Claim, results: Results, paper: Mapping[str, float], baseline: str) -> Finding:
    """Judge the bin with PASCAL's largest gain in tail TTFT, by dataset; report the P99 of all bins together
    beside it, and of RR both readings."""
    ours, verdicts, beside = [], [], []
    figures: dict[str, float] = {}
    changes: dict[str, Estimate] = {}
    for dataset, expected in paper.items():
        comparison = results.compare(dataset, baseline)
        best = comparison.best()
        change = results.change(dataset, baseline, best)
        ours.append(f"{format_estimate(change, '+.0%')} ({comparison.change_s(best):+.1f} s, bin {best})")
        verdicts.append(judge_effect(change.mean, expected))
        changes[f"{dataset}_best_change"] = change
        figures[f"{dataset}_best_bin"] = float(best)
        overall = _relative(results, dataset, "pascal", baseline, "ttft_p99_s")
        changes[f"{dataset}_overall_change"] = overall
        line = f"P99 of all requests on {dataset} {format_estimate(overall, '+.0%')}"
        if baseline == "rr":
            line += f", best bin against RR in circular order {_circular(results, dataset, changes)}"
        beside.append(line)
    figures |= means_of(changes)
    why = {
        "fcfs": "short requests no longer wait behind long ones that hold KV until their last token",
        "rr": "long reasoning no longer ranks below others' answers; short reasoning does as well under RR",
    }[baseline]
    why += _insignificant(changes)
    why = "; ".join([why, *beside])
    return Finding(claim.claim_id, " / ".join(ours), weakest(verdicts), why, figures, spreads_of(changes))


def _circular(results: Results, dataset: str, changes: dict[str, Estimate]) -> str:
    """Add the changes of the best bin and of all requests against RR in circular order (section V-A); the row
    is judged against RR by quanta used (section V-B). Return both, described."""
    best = results.compare(dataset, "rr_circular").best()
    change = results.change(dataset, "rr_circular", best)
    overall = _relative(results, dataset, "pascal", "rr_circular", "ttft_p99_s")
    changes[f"{dataset}_circular_best_change"] = change
    changes[f"{dataset}_circular_overall_change"] = overall
    return f"{format_estimate(change, '+.0%')} (bin {best}), of all {format_estimate(overall, '+.0%')}"


def _insignificant(changes: Mapping[str, Estimate]) -> str:
    """Describe changes that are within their spread."""
    insignificant = [
        name for name, e in changes.items() if e.half_width is not None and abs(e.mean) <= e.half_width
    ]
    return f"; not distinguishable from 0: {', '.join(insignificant)}" if insignificant else ""


def judge_regressions(claim: Claim, results: Results) -> Finding:
    """Judge the worst bin against each baseline, which should be small compared to the best."""
    ours, verdicts = [], []
    changes: dict[str, Estimate] = {}
    for baseline, paper in (("fcfs", 0.0612), ("rr", 0.0923)):
        comparison = results.compare(ALPACA, baseline)
        worst = comparison.worst()
        change = results.change(ALPACA, baseline, worst)
        ours.append(f"{format_estimate(change, '+.1%')} ({comparison.change_s(worst):+.1f} s, bin {worst})")
        verdicts.append(judge_bound(change.mean, paper, -comparison.change(comparison.best())))
        changes[f"{baseline}_worst_change"] = change
    why = (
        "no bin loses more than seconds: reasoning has priority, and the answers that follow preempt "
        "older ones"
    )
    spreads = spreads_of(changes)
    return Finding(claim.claim_id, " / ".join(ours), weakest(verdicts), why, means_of(changes), spreads)


def judge_slo(claim: Claim, results: Results, curves: Results) -> Finding:
    """Judge violations against each baseline in every cell, and report them over the rate."""
    held: dict[str, list[bool]] = {baseline: [] for baseline in _BASELINES}
    found: dict[str, Estimate] = {}
    for dataset in (ALPACA, ARENA):
        for level in LEVELS:
            for arm in ("pascal", *_BASELINES):
                found[f"{dataset}_{level}_{arm}"] = results.estimate(dataset, arm, level, "violations")
            pascal = found[f"{dataset}_{level}_pascal"].mean
            for baseline in _BASELINES:
                held[baseline].append(pascal <= found[f"{dataset}_{level}_{baseline}"].mean + _COMPARABLE)
    late = results.estimate(ALPACA, "late_reports", HIGH, "violations")
    found["alpaca_eval_high_late_reports"] = late
    figures: dict[str, float | Sequence[float]] = {**means_of(found)}
    figures |= _curves(curves, ("pascal", *_BASELINES), "violations")
    cells = len(held["fcfs"])
    ours = ", ".join(f"{sum(held[b])} of {cells} cells vs {b.upper()}" for b in _BASELINES)
    high = " / ".join(
        format_estimate(found[f"{ALPACA}_{HIGH}_{arm}"], ".2%") for arm in ("pascal", *_BASELINES)
    )
    why = (
        f"AlpacaEval2.0, high: {high} (PASCAL / FCFS / RR). With reports up to half a second old, answers go "
        f"to instances whose room is gone, and PASCAL has {format_estimate(late, '.2%')}. The rate decides: "
        "see the curve"
    )
    verdict = judge_ordering([*held["fcfs"], *held["rr"]])
    return Finding(claim.claim_id, ours, verdict, why, figures, spreads_of(found))


def judge_throughput(claim: Claim, results: Results) -> Finding:
    """Judge throughput (tokens over the time until the last one) against each baseline, in every cell."""
    found: dict[str, Estimate] = {}
    for dataset in (ALPACA, ARENA):
        for level in LEVELS:
            pascal = results.per_seed(dataset, "pascal", level, "tokens_per_s")
            for baseline in _BASELINES:
                theirs = results.per_seed(dataset, baseline, level, "tokens_per_s")
                pairs = zip(pascal, theirs, strict=True)
                found[f"{dataset}_{level}_vs_{baseline}"] = estimate(
                    [ours / other - 1.0 for ours, other in pairs]
                )
    worst = max(found.values(), key=lambda change: abs(change.mean))
    why = (
        "the batch is equally full under any order; the difference is when the longest request, alone at "
        "the end, finishes"
    )
    ours = f"at most {format_estimate(worst, '+.1%')}"
    verdict = judge_bound(abs(worst.mean), 0.03, 0.1)
    return Finding(claim.claim_id, ours, verdict, why, means_of(found), spreads_of(found))


def judge_transfer(claim: Claim, results: Results) -> Finding:
    """Judge the P99 of transfers at the high rate."""
    found = {
        "alpaca_s": results.estimate(ALPACA, "pascal", HIGH, "transfer_p99_s"),
        "arena_s": results.estimate(ARENA, "pascal", HIGH, "transfer_p99_s"),
    }
    alpaca, arena = found["alpaca_s"], found["arena_s"]
    all_move = results.mean(ALPACA, "non_adaptive", HIGH, "transfer_p99_s")
    verdict = weakest([judge_value(alpaca.mean, 0.14), judge_value(arena.mean, 0.25)])
    why = (
        f"the longest stay, since no target has room for them (NonAdaptive moves all: {all_move:.2f} s "
        "on AlpacaEval2.0); the generators' P99 lengths are derived from this row, so only links are checked"
    )
    ours = f"{format_estimate(alpaca, '.2f')} s / {format_estimate(arena, '.2f')} s"
    return Finding(claim.claim_id, ours, verdict, why, means_of(found), spreads_of(found))


def judge_no_migration(claim: Claim, results: Results, curves: Results) -> Finding:
    """Judge blocking without migration against blocking with it."""
    found = {
        f"{arm}_s": results.estimate(ALPACA, arm, HIGH, "blocking_p99_s")
        for arm in ("no_migration", "pascal")
    }
    without, with_it = found["no_migration_s"], found["pascal_s"]
    verdict = Verdict.DOES_NOT_HOLD
    if without.mean > with_it.mean and without.mean > 1.0:
        near_zero = Verdict.HOLDS if with_it.mean < 1.0 else Verdict.DIRECTION
        verdict = weakest([judge_value(without.mean, 27.39), near_zero])
    violations = [results.mean(ALPACA, arm, HIGH, "violations") for arm in ("no_migration", "pascal")]
    curve = _curves(curves, ("no_migration", "pascal"), "blocking_p99_s")
    figures: dict[str, float | Sequence[float]] = {**means_of(found), **curve}
    lines = (
        curve[f"curve_{name}"] for name in ("loads", "no_migration_blocking_p99_s", "pascal_blocking_p99_s")
    )
    beyond = ", ".join(
        f"{one:.1f} s vs {other:.2f} s at {load:g}"
        for load, one, other in zip(*lines, strict=True)
        if load > LOADS[HIGH]
    )
    why = (
        f"the load decides: {beyond}. At {LOADS[HIGH]} the violations are {violations[0]:.1%} vs "
        f"{violations[1]:.1%}"
    )
    ours = f"{format_estimate(without, '.2f')} s vs {format_estimate(with_it, '.2f')} s"
    return Finding(claim.claim_id, ours, verdict, why, figures, spreads_of(found))


def judge_adaptive(slo: Claim, latency: Claim, results: Results, curves: Results) -> tuple[Finding, Finding]:
    """Judge what adaptive migration saves in violations and in latency."""
    found = {arm: results.estimate(ALPACA, arm, HIGH, "violations") for arm in ("non_adaptive", "pascal")}
    without, with_it = found["non_adaptive"], found["pascal"]
    verdict = judge_effect(without.mean - with_it.mean, 0.0745 - 0.0069)
    why = (
        "without it requests go to the instance with least reasoning even if its KV is full, and wait "
        "in its host memory; for other rates see the curve"
    )
    figures: dict[str, float | Sequence[float]] = {**means_of(found)}
    figures |= _curves(curves, ("non_adaptive", "pascal"), "violations")
    ours = f"{format_estimate(without, '.2%')} vs {format_estimate(with_it, '.2%')}"
    first = Finding(slo.claim_id, ours, verdict, why, figures, spreads_of(found))
    changes = {
        f"{name}_change": _relative(results, ALPACA, "non_adaptive", "pascal", f"latency_{name}_s")
        for name in ("p50", "p99")
    }
    median, tail = changes["p50_change"], changes["p99_change"]
    verdict = weakest([judge_effect(median.mean, 0.201), judge_effect(tail.mean, 0.097)])
    moves = [results.mean(ALPACA, arm, HIGH, "migrations") for arm in ("non_adaptive", "pascal")]
    why = (
        f"the same waits, as latency, of the {moves[0] - moves[1]:.0f} requests a run that NonAdaptive moves "
        "and PASCAL does not; the paper gives no absolute latencies to compare with"
    )
    ours = f"{format_estimate(median, '+.1%')} / {format_estimate(tail, '+.1%')}"
    second = Finding(latency.claim_id, ours, verdict, why, means_of(changes), spreads_of(changes))
    return first, second


def _curves(curves: Results, arms: Sequence[str], name: str) -> dict[str, list[float]]:
    """Return a figure over the loads for a finding (AlpacaEval2.0)."""
    return {f"curve_{key}": line for key, line in curves.curves(ALPACA, arms, name).items()}


def _relative(results: Results, dataset: str, arm: str, other: str, name: str) -> Estimate:
    """Return a figure of one scheduler over another's, less one, seed by seed, at the high rate."""
    pairs = zip(
        results.per_seed(dataset, arm, HIGH, name), results.per_seed(dataset, other, HIGH, name), strict=True
    )
    return estimate([one / two - 1.0 for one, two in pairs])


def judge_mixed(
    claim: Claim, results: Results, baseline: str, paper_best: float, paper_worst: float
) -> Finding:
    """Judge the best and worst bins on the mixture; against FCFS, the worst of long reasoning."""
    comparison = results.compare(MIXED, baseline)
    best = comparison.best()
    long = [s for s in comparison.starts if s >= _LONG_TOKENS] if baseline == "fcfs" else []
    worst = max(long or comparison.starts, key=comparison.change)
    changes = {
        "best_change": results.change(MIXED, baseline, best),
        "worst_change": results.change(MIXED, baseline, worst),
    }
    gain, loss = changes["best_change"], changes["worst_change"]
    verdict = weakest([judge_effect(gain.mean, paper_best), judge_bound(loss.mean, paper_worst, -gain.mean)])
    changes["overall_change"] = overall = _relative(results, MIXED, "pascal", baseline, "ttft_p99_s")
    why = {
        "fcfs": "FCFS at this load queues short and long requests for minutes; even demoted reasoning gains",
        "rr": "bins of long reasoning have about ten requests per run, all of them demoted by PASCAL",
    }[baseline] + _insignificant(changes)
    why += f"; P99 of all requests {format_estimate(overall, '+.0%')}"
    if baseline == "rr":
        why += f", best bin against RR in circular order {_circular(results, MIXED, changes)}"
    ours = f"{format_estimate(gain, '+.0%')} (bin {best}) / {format_estimate(loss, '+.1%')} (bin {worst})"
    figures = {**means_of(changes), "worst_bin": float(worst)}
    return Finding(claim.claim_id, ours, verdict, why, figures, spreads_of(changes))
