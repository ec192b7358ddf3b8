"""PASCAL's rows judged from the figures of all runs; each function returns the finding of its row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from simulator.claims.base import Claim, Finding, Verdict
from simulator.claims.pascal.results import ALPACA, ARENA, BEYOND, BEYOND_LOAD, HIGH, LOADS, MIXED, Results
from simulator.claims.verdicts import of_bound, of_effect, of_ordering, weakest

# Violations of two schedulers count as equal when they differ by less: about the resolution of the runs.
_COMPARABLE: Final = 0.001
# First bin of "long reasoning": where PASCAL demotes.
_LONG_TOKENS: Final = 5_000 // 256 * 256
_BASELINES: Final = ("fcfs", "rr")


def judge_gain(claim: Claim, results: Results, paper: Mapping[str, float], baseline: str) -> Finding:
    """The bin in which PASCAL's tail TTFT gains most, by dataset."""
    ours, verdicts, figures = [], [], {}
    for dataset, expected in paper.items():
        comparison = results.compare(dataset, baseline)
        best = comparison.best()
        change = comparison.change(best)
        ours.append(f"{change:+.0%} ({comparison.change_s(best):+.1f} s, bin {best})")
        verdicts.append(of_effect(change, expected))
        figures[f"{dataset}_best_change"] = change
        figures[f"{dataset}_best_bin"] = float(best)
    why = {
        "fcfs": "short requests no longer wait behind long ones that hold KV until their last token",
        "rr": "long reasoning no longer ranks below others' answers; short reasoning does as well under RR",
    }[baseline]
    return Finding(claim.claim_id, " / ".join(ours), weakest(verdicts), why, figures)


def judge_regressions(claim: Claim, results: Results) -> Finding:
    """The worst bin against each baseline: small beside the best."""
    ours, verdicts, figures = [], [], {}
    for baseline, paper in (("fcfs", 0.0612), ("rr", 0.0923)):
        comparison = results.compare(ALPACA, baseline)
        worst = comparison.worst()
        change = comparison.change(worst)
        ours.append(f"{change:+.1%} ({comparison.change_s(worst):+.1f} s, bin {worst})")
        verdicts.append(of_bound(change, paper, -comparison.change(comparison.best())))
        figures[f"{baseline}_worst_change"] = change
    why = (
        "no bin loses more than seconds: reasoning comes first, and what follows it at once preempts "
        "older answers"
    )
    return Finding(claim.claim_id, " / ".join(ours), weakest(verdicts), why, figures)


def judge_slo(claim: Claim, results: Results) -> Finding:
    """Violations against each baseline, in every cell."""
    held: dict[str, list[bool]] = {baseline: [] for baseline in _BASELINES}
    figures: dict[str, float] = {}
    for dataset in (ALPACA, ARENA):
        for level in LOADS:
            pascal = results.mean(dataset, "pascal", level, "violations")
            figures[f"{dataset}_{level}_pascal"] = pascal
            for baseline in _BASELINES:
                theirs = results.mean(dataset, baseline, level, "violations")
                figures[f"{dataset}_{level}_{baseline}"] = theirs
                held[baseline].append(pascal <= theirs + _COMPARABLE)
    cells = len(held["fcfs"])
    ours = ", ".join(f"{sum(held[b])} of {cells} cells vs {b.upper()}" for b in _BASELINES)
    high = " / ".join(f"{figures[f'{ALPACA}_{HIGH}_{arm}']:.2%}" for arm in ("pascal", *_BASELINES))
    why = (
        f"AlpacaEval2.0, high: {high} (PASCAL / FCFS / RR). Strict priority of reasoning leaves "
        "answers what KV is "
        "left, and Algorithm 2 gathers them on few instances; RR lets long reasoning pay, which no SLO counts"
    )
    return Finding(claim.claim_id, ours, of_ordering([*held["fcfs"], *held["rr"]]), why, figures)


def judge_throughput(claim: Claim, results: Results) -> Finding:
    """Tokens over the time until the last is made, against each baseline, in every cell."""
    figures: dict[str, float] = {}
    for dataset in (ALPACA, ARENA):
        for level in LOADS:
            pascal = results.mean(dataset, "pascal", level, "tokens_per_s")
            for baseline in _BASELINES:
                theirs = results.mean(dataset, baseline, level, "tokens_per_s")
                figures[f"{dataset}_{level}_vs_{baseline}"] = pascal / theirs - 1.0
    worst = max(figures.values(), key=abs)
    why = (
        "the batch is as full under any order; what differs is when the longest request, alone at the "
        "end, is done"
    )
    return Finding(claim.claim_id, f"at most {worst:+.1%}", of_bound(abs(worst), 0.03, 0.1), why, figures)


def judge_transfer(claim: Claim, results: Results) -> Finding:
    """P99 of transfers at the high rate."""
    alpaca = results.mean(ALPACA, "pascal", HIGH, "transfer_p99_s")
    arena = results.mean(ARENA, "pascal", HIGH, "transfer_p99_s")
    all_move = results.mean(ALPACA, "non_adaptive", HIGH, "transfer_p99_s")
    verdict = weakest([of_effect(alpaca, 0.14), of_effect(arena, 0.25)])
    why = (
        f"the longest stay, for no target has room for them (NonAdaptive, which moves all: {all_move:.2f} s "
        "on AlpacaEval2.0); the generators' P99 lengths are derived from this row, so only links are checked"
    )
    figures = {"alpaca_s": alpaca, "arena_s": arena}
    return Finding(claim.claim_id, f"{alpaca:.2f} s / {arena:.2f} s", verdict, why, figures)


def judge_no_migration(claim: Claim, results: Results) -> Finding:
    """Blocking without migration against blocking with it."""
    without = results.mean(ALPACA, "no_migration", HIGH, "blocking_p99_s")
    with_it = results.mean(ALPACA, "pascal", HIGH, "blocking_p99_s")
    near_zero = with_it < 1.0
    verdict = Verdict.DOES_NOT_HOLD
    if without > with_it and without > 1.0:
        verdict = weakest([of_effect(without, 27.39), Verdict.HOLDS if near_zero else Verdict.DIRECTION])
    violations = [results.mean(ALPACA, arm, HIGH, "violations") for arm in ("no_migration", "pascal")]
    beyond = [results.mean(ALPACA, arm, BEYOND, "blocking_p99_s") for arm in ("no_migration", "pascal")]
    why = (
        "a fresh answer takes an older one's place until reasoning holds a whole device: at "
        f"{BEYOND_LOAD} of "
        f"saturation it is {beyond[0]:.1f} s vs {beyond[1]:.2f} s; at 1.2 NoMigration's cost is in "
        "violations, "
        f"{violations[0]:.1%} vs {violations[1]:.1%}"
    )
    figures = {
        "no_migration_s": without,
        "pascal_s": with_it,
        "no_migration_beyond_s": beyond[0],
        "pascal_beyond_s": beyond[1],
    }
    return Finding(claim.claim_id, f"{without:.2f} s vs {with_it:.2f} s", verdict, why, figures)


def judge_adaptive(slo: Claim, latency: Claim, results: Results) -> tuple[Finding, Finding]:
    """What adaptive migration saves: violations, and latency."""
    without = results.mean(ALPACA, "non_adaptive", HIGH, "violations")
    with_it = results.mean(ALPACA, "pascal", HIGH, "violations")
    verdict = of_effect(without - with_it, 0.0745 - 0.0069)
    why = (
        "without it requests go to the instance with least reasoning also when its KV is full, and wait "
        "in its host memory"
    )
    figures = {"non_adaptive": without, "pascal": with_it}
    first = Finding(slo.claim_id, f"{without:.2%} vs {with_it:.2%}", verdict, why, figures)
    changes = [
        results.mean(ALPACA, "non_adaptive", HIGH, name) / results.mean(ALPACA, "pascal", HIGH, name) - 1.0
        for name in ("latency_p50_s", "latency_p99_s")
    ]
    verdict = weakest([of_effect(changes[0], 0.201), of_effect(changes[1], 0.097)])
    moves = [results.mean(ALPACA, arm, HIGH, "migrations") for arm in ("non_adaptive", "pascal")]
    why = (
        f"the same waits, in latency, of the {moves[0] - moves[1]:.0f} requests a run that NonAdaptive moves "
        "and PASCAL does not; the paper gives no absolute latencies to compare with"
    )
    figures = {"median_change": changes[0], "p99_change": changes[1]}
    second = Finding(latency.claim_id, f"{changes[0]:+.1%} / {changes[1]:+.1%}", verdict, why, figures)
    return first, second


def judge_mixed(
    claim: Claim, results: Results, baseline: str, paper_best: float, paper_worst: float
) -> Finding:
    """Best and worst bins on the mixture; against FCFS, the worst of long reasoning."""
    comparison = results.compare(MIXED, baseline)
    best = comparison.best()
    long = [s for s in comparison.starts if s >= _LONG_TOKENS] if baseline == "fcfs" else []
    worst = max(long or comparison.starts, key=comparison.change)
    gain, loss = comparison.change(best), comparison.change(worst)
    verdict = weakest([of_effect(gain, paper_best), of_bound(loss, paper_worst, -gain)])
    why = {
        "fcfs": "FCFS at this load queues for minutes, the short as long as the long; even demoted reasoning "
        "gains",
        "rr": "answers are short here, so that RR's order is nearly PASCAL's; the worst bin has five to "
        "eleven requests a run, all of them demoted by PASCAL",
    }[baseline]
    figures = {"best_change": gain, "worst_change": loss, "worst_bin": float(worst)}
    ours = f"{gain:+.0%} (bin {best}) / {loss:+.1%} (bin {worst})"
    return Finding(claim.claim_id, ours, verdict, why, figures)
