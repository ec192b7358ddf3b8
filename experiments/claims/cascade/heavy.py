"""C1 to C5, C8, C10, C11: results of a heavily loaded testbed (sections 6.2 to 6.5); see operating.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from experiments.claims.base import WHOLE, Claim, Effort, Experiment, Figures, Finding, Run, Verdict
from experiments.claims.cascade.cluster import (
    CHAIN,
    FIGURE_2,
    FULL,
    LLUMNIX,
    MEASURED,
    MEMORY,
    ONE_STAGE,
    PENALTY_INPUT,
    QUANTITY,
)
from experiments.claims.cascade.operating import (
    BEYOND,
    HEAVY,
    VLLM,
    Cell,
    Results,
    Span,
    cells,
    span_of,
)
from experiments.claims.cascade.serving import serve
from experiments.claims.verdicts import format_estimate, judged, weakest
from simulator.estimate import Estimate

_NAME: Final = "cascade-heavy"
# For rows whose parts are judged at different loads.
_WORDS: Final[Mapping[str, str]] = {"normalized_s": "latency", "tokens_per_s": "throughput"}
# An attainment below which a ratio is meaningless.
_FEW: Final = 0.005
# Seconds on one core per second of arrivals.
_COST_S: Final[Mapping[str, float]] = {VLLM: 0.05, LLUMNIX: 0.06}
_COST_OF_STAGES_S: Final = 0.11


@dataclass(frozen=True, slots=True)
class Against:
    """CascadeInfer over one baseline by one figure: the paper's relative change is in [low, high]."""

    baseline: str
    figure: str
    low: float
    high: float
    # By penalty.
    loads: Mapping[str, float]

    def change(self, results: Results, penalty: str, load: float) -> Estimate:
        """Return ours over the baseline's, less 1; an attainment of zero counts as that of one request."""
        smallest = 0.0
        if self.share:
            smallest = 1.0 / results.requests(self.baseline, penalty, load)
        return results.change(self.baseline, penalty, load, self.figure, smallest)

    @property
    def share(self) -> bool:
        """Return whether the figure is a share of the requests, which may be zero."""
        return self.figure.startswith("attainment")

    def verdict(self, change: float) -> Verdict:
        """Return the verdict: holds within the range, widened by a third at either end, and exceeds above."""
        if change * self.low <= 0.0:
            return Verdict.DOES_NOT_HOLD
        if abs(change) > abs(self.high) * 4 / 3:
            return Verdict.EXCEEDS
        return Verdict.HOLDS if abs(change) >= abs(self.low) * 2 / 3 else Verdict.DIRECTION


@dataclass(frozen=True, slots=True)
class Row:
    """A claim, its comparisons, and the layout that must be the worst, if any."""

    claim: Claim
    against: tuple[Against, ...]
    why: str
    worst: str | None = None


def _claim(claim_id: str, where: str, statement: str, number: str) -> Claim:
    return Claim(claim_id, "CascadeInfer", where, statement, number, PENALTY_INPUT)


def _latency(baseline: str, figure: str, low: float, high: float) -> Against:
    return Against(baseline, figure, low, high, HEAVY)


def _throughput(baseline: str, gain: float) -> Against:
    return Against(baseline, "tokens_per_s", gain, gain, BEYOND)


# SGLang is another engine: the part of each row about it is left out.
ROWS: Final = (
    Row(
        _claim("C1", "Fig. 6", "mean TTFT, heavy load, vs vLLM / Llumnix", "-67..78% / -36..66%"),
        (_latency(VLLM, "ttft_mean_s", -0.67, -0.78), _latency(LLUMNIX, "ttft_mean_s", -0.36, -0.66)),
        "short prompts do not wait for long ones, which go to other instances",
    ),
    Row(
        _claim("C2", "Fig. 6", "P95 TTFT, vs vLLM / Llumnix", "-56% / -19%"),
        (_latency(VLLM, "ttft_p95_s", -0.56, -0.56), _latency(LLUMNIX, "ttft_p95_s", -0.19, -0.19)),
        "as C1: the 95th percentile is a short prompt without long ones ahead of it",
    ),
    Row(
        _claim("C3", "Fig. 7", "mean TPOT, heavy load, vs vLLM / Llumnix", "-30..64% / -3.4..56%"),
        (_latency(VLLM, "tpot_mean_s", -0.30, -0.64), _latency(LLUMNIX, "tpot_mean_s", -0.034, -0.56)),
        "batches of similar lengths avoid figure 2's penalty; Llumnix's newer engine is not modelled",
    ),
    Row(
        _claim("C4", "Fig. 7", "P95 TPOT, vs vLLM / Llumnix", "-25% / -20%"),
        (_latency(VLLM, "tpot_p95_s", -0.25, -0.25), _latency(LLUMNIX, "tpot_p95_s", -0.20, -0.20)),
        "as C3",
    ),
    Row(
        _claim("C5", "Fig. 10", "throughput, heavy load, vs vLLM / Llumnix", "1.99x / 1.71x"),
        (_throughput(VLLM, 0.99), _throughput(LLUMNIX, 0.71)),
        "prefill is two fifths of the work on an H20 if unequal lengths cost nothing, and no layout makes it "
        "cheaper: if decoding is 2.1 times as fast, the limit is 1.63x",
    ),
    Row(
        _claim("C8", "Fig. 12", "SLO attainment at 5x / 20x SLO, vs vLLM", "3.8-7.6x / 2.0-2.8x"),
        (_latency(VLLM, "attainment_5x", 2.8, 6.6), _latency(VLLM, "attainment_20x", 1.0, 1.8)),
        "the service level is that of one request of mean lengths alone; the load determines the ratio",
    ),
    Row(
        _claim("C10", "Fig. 14", "latency / throughput vs chain; no pipeline worst", "-30% / +7.1%"),
        (_latency(CHAIN, "normalized_s", -0.30, -0.30), _throughput(CHAIN, 0.071)),
        "a chain that does not keep up has the latency of a growing queue; whether its handovers or having "
        "one instance per stage is the cause was not determined",
        worst=ONE_STAGE,
    ),
    Row(
        _claim("C11", "Fig. 15", "latency / throughput vs memory-based; quantity-based worst", "-21% / +12%"),
        (_latency(MEMORY, "normalized_s", -0.21, -0.21), _throughput(MEMORY, 0.12)),
        "all start from one plan and replan every minute; where refinement moves a boundary until a stage "
        "falls behind, latency is that of a growing queue. Stages are weighted regardless of their number "
        "of instances, which is our interpretation of the baselines",
        worst=QUANTITY,
    ),
)
_ROW_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "C10": (FULL, CHAIN, ONE_STAGE),
    "C11": (FULL, MEMORY, QUANTITY),
}


def heavy(effort: Effort = WHOLE) -> Experiment:
    """Return the experiment: every scheduler with figure 2's penalty, and some with the measured one."""
    runs = tuple(_run(cell, span_of(effort, cell.penalty, cell.load)) for cell in cells(effort))
    return Experiment(_NAME, tuple(row.claim for row in ROWS), runs, partial(judge, effort))


def _run(cell: Cell, span: Span) -> Run:
    cost_s = _COST_S.get(cell.policy, _COST_OF_STAGES_S) * span.seconds
    arguments = (cell.policy, cell.penalty, cell.load, span.seconds, span.warm_up, cell.seed)
    return Run(cell.name, serve, arguments, cost_s)


def judge(effort: Effort, figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Judge each row by the weakest of its parts."""
    results = Results(figures, effort)
    return [found for row in ROWS for found in judged((row.claim,), _finding, row, results)]


def _finding(row: Row, results: Results) -> Finding:
    changes = [part.change(results, FIGURE_2, part.loads[FIGURE_2]) for part in row.against]
    verdicts = [part.verdict(change.mean) for part, change in zip(row.against, changes, strict=True)]
    reasons = [_judged_loads(row, results), row.why]
    if row.worst is not None:
        group = _ROW_GROUPS[row.claim.claim_id]
        found = max(group, key=lambda policy: _mean(results, policy, "normalized_s"))
        if found != row.worst:
            # The numbers may agree even if the ordering does not.
            verdicts.append(Verdict.DIRECTION)
            reasons.append(f"worst is {found}, not {row.worst}")
    reasons += _other_loads(row, results)
    figures, spreads = _details(row, results)
    return Finding(
        row.claim.claim_id,
        " / ".join(
            _formatted(part, change, results, FIGURE_2, part.loads[FIGURE_2])
            for part, change in zip(row.against, changes, strict=True)
        ),
        weakest(verdicts),
        "; ".join(reasons),
        figures,
        spreads,
    )


def _judged_loads(row: Row, results: Results) -> str:
    """Describe the loads that are judged, and who keeps up there."""
    parts = []
    for load in dict.fromkeys(part.loads[FIGURE_2] for part in row.against):
        policies = [FULL, *(part.baseline for part in row.against if part.loads[FIGURE_2] == load)]
        kept = ", ".join(
            f"{policy.rpartition(':')[2]} {results.estimate(policy, FIGURE_2, load, 'kept_up').mean:.0%}"
            for policy in dict.fromkeys(policies)
        )
        parts.append(f"at load {load:g} (tokens produced of those demanded: {kept})")
    return " and ".join(parts)


def _other_loads(row: Row, results: Results) -> list[str]:
    """Describe the same comparison at the other loads of the curve, and with measured kernels."""
    found: list[str] = []
    for penalty, words in ((FIGURE_2, ""), (MEASURED, "with measured kernels ")):
        for load in results.curve(FULL, penalty):
            there = [
                part
                for part in row.against
                if results.has(part.baseline, penalty, load)
                and (penalty, load) != (FIGURE_2, part.loads[FIGURE_2])
            ]
            if there:
                shown = [
                    _formatted(
                        part, _without_spread(part.change(results, penalty, load)), results, penalty, load
                    )
                    for part in there
                ]
                what = "" if len(there) == len(row.against) else f"{_WORDS.get(there[0].figure, '')} "
                found.append(f"{words}at {load:g}: {what}{' / '.join(shown)}")
    return found


def _without_spread(change: Estimate) -> Estimate:
    """Remove the spread, which the figures contain."""
    return Estimate(change.mean, None)


def _details(row: Row, results: Results) -> tuple[dict[str, float | Sequence[float]], dict[str, float]]:
    """Return every change with its figures, at every load, and the spreads that exist."""
    figures: dict[str, float | Sequence[float]] = {}
    spreads: dict[str, float] = {}

    def put(name: str, found: Estimate) -> None:
        figures[name] = found.mean
        if found.half_width is not None:
            spreads[name] = found.half_width

    for penalty in (FIGURE_2, MEASURED):
        for part in row.against:
            for load in results.curve(part.baseline, penalty):
                where = f"{penalty}.{load:g}"
                put(f"{where}.{part.figure}.vs_{part.baseline}", part.change(results, penalty, load))
                for policy in (FULL, part.baseline):
                    for figure in (part.figure, "kept_up", "ttft_longest_share", "ttft_growth"):
                        put(f"{where}.{policy}.{figure}", results.estimate(policy, penalty, load, figure))
    for policy in _ROW_GROUPS.get(row.claim.claim_id, ()):
        load = HEAVY[FIGURE_2]
        for figure in ("normalized_s", "ttft_mean_s", "tpot_mean_s", "kept_up", "stages", "migrations"):
            put(f"{FIGURE_2}.{load:g}.{policy}.{figure}", results.estimate(policy, FIGURE_2, load, figure))
    return figures, spreads


def _formatted(part: Against, change: Estimate, results: Results, penalty: str, load: float) -> str:
    """Format as in the paper: ratios of attainment and of large throughputs, otherwise percent."""
    if part.share:
        ours, theirs = (
            results.estimate(policy, penalty, load, part.figure).mean for policy in (FULL, part.baseline)
        )
        ratio = f"{1.0 + change.mean:.2f}x" if theirs > _FEW else "no meaningful ratio"
        return f"{ratio} ({ours:.1%} against {theirs:.1%})"
    if part.low >= 0.5:
        return f"{format_estimate(Estimate(1.0 + change.mean, change.half_width), '.2f')}x"
    return format_estimate(change, "+.0%")


def _mean(results: Results, policy: str, name: str) -> float:
    return results.estimate(policy, FIGURE_2, HEAVY[FIGURE_2], name).mean
