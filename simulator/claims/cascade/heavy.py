"""C1 to C5, C8, C10, C11: everything that one heavily loaded testbed shows (sections 6.2 to 6.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from simulator.claims.base import Claim, Experiment, Figures, Finding, Run, Verdict
from simulator.claims.cascade.cluster import FIGURE_2, MEASURED
from simulator.claims.cascade.serving import serve
from simulator.claims.figures import number
from simulator.claims.verdicts import weakest

_NAME: Final = "cascade-heavy"
_OURS: Final = "cascade"
# The paper's names of what it is compared with.
_VLLM, _LLUMNIX = "round_robin", "llumnix"
_CHAIN, _ONE_STAGE = "cascade_chain", "cascade_no_pipeline"
_QUANTITY, _MEMORY = "cascade_quantity", "cascade_memory"
_POLICIES: Final = (_OURS, _VLLM, _LLUMNIX, _CHAIN, _ONE_STAGE, _QUANTITY, _MEMORY)
# What is served again with measured kernels: the two ends of what is known of unequal lengths.
_MEASURED: Final = (_OURS, _VLLM, _LLUMNIX, _CHAIN, _MEMORY)


@dataclass(frozen=True, slots=True)
class Against:
    """CascadeInfer over one baseline by one figure: the relative change is in [least, most]."""

    baseline: str
    figure: str
    least: float
    most: float

    def change(self, figures: Mapping[str, Figures], penalty: str) -> float:
        """Ours over the baseline's, less 1."""
        return (
            _figure(figures, _OURS, penalty, self.figure)
            / _figure(figures, self.baseline, penalty, self.figure)
            - 1.0
        )

    def verdict(self, change: float) -> Verdict:
        """Holds within the range, widened by a third of either end."""
        if change * self.least <= 0.0:
            return Verdict.DOES_NOT_HOLD
        inside = abs(self.least) * 2 / 3 <= abs(change) <= abs(self.most) * 4 / 3
        return Verdict.HOLDS if inside else Verdict.DIRECTION


@dataclass(frozen=True, slots=True)
class Row:
    """A claim, what it compares, and what must be the worst of all layouts, if anything."""

    claim: Claim
    against: tuple[Against, ...]
    why: str
    worst: str | None = None


def _claim(claim_id: str, where: str, statement: str, number: str) -> Claim:
    return Claim(claim_id, "CascadeInfer", where, statement, number)


# SGLang is another engine: the part of each row about it is left out.
ROWS: Final = (
    Row(
        _claim("C1", "Fig. 6", "mean TTFT, heavy load, vs vLLM / Llumnix", "-67..78% / -36..66%"),
        (Against(_VLLM, "ttft_mean_s", -0.67, -0.78), Against(_LLUMNIX, "ttft_mean_s", -0.36, -0.66)),
        "the longest prompts queue at the few instances of the last stages (ttft_longest_share): Eq. (1) "
        "plans for batches, not for queues of prompts",
    ),
    Row(
        _claim("C2", "Fig. 6", "P95 TTFT, vs vLLM / Llumnix", "-56% / -19%"),
        (Against(_VLLM, "ttft_p95_s", -0.56, -0.56), Against(_LLUMNIX, "ttft_p95_s", -0.19, -0.19)),
        "the 95th percentile is below the prompts that queue in the last stages",
    ),
    Row(
        _claim("C3", "Fig. 7", "mean TPOT, heavy load, vs vLLM / Llumnix", "-30..64% / -3.4..56%"),
        (Against(_VLLM, "tpot_mean_s", -0.30, -0.64), Against(_LLUMNIX, "tpot_mean_s", -0.034, -0.56)),
        "batches of similar lengths escape figure 2's penalty; Llumnix's newer engine is not modelled",
    ),
    Row(
        _claim("C4", "Fig. 7", "P95 TPOT, vs vLLM / Llumnix", "-25% / -20%"),
        (Against(_VLLM, "tpot_p95_s", -0.25, -0.25), Against(_LLUMNIX, "tpot_p95_s", -0.20, -0.20)),
        "as C3",
    ),
    Row(
        _claim("C5", "Fig. 10", "throughput, heavy load, vs vLLM / Llumnix", "1.99x / 1.71x"),
        (Against(_VLLM, "tokens_per_s", 0.99, 0.99), Against(_LLUMNIX, "tokens_per_s", 0.71, 0.71)),
        "prefill is two fifths of the work on an H20, and no layout makes it cheaper",
    ),
    Row(
        _claim("C8", "Fig. 12", "SLO attainment at 5x / 20x SLO, vs vLLM", "3.8-7.6x / 2.0-2.8x"),
        (Against(_VLLM, "attainment_5x", 2.8, 6.6), Against(_VLLM, "attainment_20x", 1.0, 1.8)),
        "the service level is one request's alone, of mean lengths",
    ),
    Row(
        _claim("C10", "Fig. 14", "latency / throughput vs chain; no pipeline worst", "-30% / +7.1%"),
        (Against(_CHAIN, "normalized_s", -0.30, -0.30), Against(_CHAIN, "tokens_per_s", 0.071, 0.071)),
        "a chain has one instance a stage: nobody to share a burst with",
        worst=_ONE_STAGE,
    ),
    Row(
        _claim("C11", "Fig. 15", "latency / throughput vs memory-based; quantity-based worst", "-21% / +12%"),
        (Against(_MEMORY, "normalized_s", -0.21, -0.21), Against(_MEMORY, "tokens_per_s", 0.12, 0.12)),
        "both start from one plan; six refinements leave boundaries that are as good as each other",
        worst=_QUANTITY,
    ),
)
_ROW_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "C10": (_OURS, _CHAIN, _ONE_STAGE),
    "C11": (_OURS, _MEMORY, _QUANTITY),
}


def heavy() -> Experiment:
    """Every scheduler with figure 2's penalty, and some again with the measured one."""
    runs = [Run(run_name(policy, FIGURE_2), serve, (policy, FIGURE_2), 12.0) for policy in _POLICIES]
    runs += [Run(run_name(policy, MEASURED), serve, (policy, MEASURED), 12.0) for policy in _MEASURED]
    return Experiment(_NAME, tuple(row.claim for row in ROWS), tuple(runs), judge)


def run_name(policy: str, penalty: str) -> str:
    """Name of a run."""
    return f"{_NAME}/{policy}/{penalty}"


def judge(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """The weakest of a row's parts decides."""
    return [_finding(row, figures) for row in ROWS]


def _finding(row: Row, figures: Mapping[str, Figures]) -> Finding:
    changes = [part.change(figures, FIGURE_2) for part in row.against]
    measured = [part.change(figures, MEASURED) for part in row.against]
    verdicts = [part.verdict(change) for part, change in zip(row.against, changes, strict=True)]
    why = row.why
    if row.worst is not None:
        group = _ROW_GROUPS[row.claim.claim_id]
        found = max(group, key=lambda policy: _figure(figures, policy, FIGURE_2, "normalized_s"))
        if found != row.worst:
            # The numbers may agree where the ordering does not.
            verdicts.append(Verdict.DIRECTION)
            why = f"worst is {found}, not {row.worst}; {why}"
    detail: dict[str, float | Sequence[float]] = {"figure_2": changes, "measured": measured}
    for policy in dict.fromkeys([_OURS, *(part.baseline for part in row.against)]):
        detail |= {f"{policy}.{name}": value for name, value in figures[run_name(policy, FIGURE_2)].items()}
    return Finding(
        row.claim.claim_id,
        " / ".join(map(_shown, row.against, changes)),
        weakest(verdicts),
        f"{why}. With measured kernels: {' / '.join(map(_shown, row.against, measured))}",
        detail,
    )


def _shown(part: Against, change: float) -> str:
    """As the paper prints it: ratios of attainment and of large throughputs, else percent."""
    return f"{1.0 + change:.2f}x" if part.least >= 0.5 else f"{change:+.0%}"


def _figure(figures: Mapping[str, Figures], policy: str, penalty: str, name: str) -> float:
    return number(figures[run_name(policy, penalty)], name)
