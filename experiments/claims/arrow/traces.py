"""R10 and R11: variability of the traces (section 3.1), from the public files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from experiments.claims.arrow.cluster import CODE, CONVERSATION
from experiments.claims.arrow.not_checked import without_traces
from experiments.claims.arrow.statistics import load_per_minute
from experiments.claims.base import Claim, Experiment, Figures, Finding, Run
from experiments.claims.verdicts import judge_value, number, weakest
from simulator.workloads.base import Clip
from simulator.workloads.traces import load_mooncake

R10 = Claim(
    "R10",
    "Arrow",
    "Fig. 1",
    "vertical diversity: Azure Code's peak and least minute, input / output",
    "1327.9K / 16.6K, 25.7K / .25K",
)
R11 = Claim(
    "R11",
    "Arrow",
    "Fig. 1",
    "horizontal diversity: variation of Code and Mooncake; correlation of Code and Conversation",
    ".80, .16; .95, .29",
)
_MOONCAKE: Final = "mooncake/conversation_trace.jsonl"
_NAME: Final = "arrow-traces"
# The paper's numbers by the names of our figures. BurstGPT's variation is left out: its hour is not stated.
_VERTICAL: Final[Mapping[str, float]] = {
    "code_peak_input": 1_327_900.0,
    "code_peak_output": 16_600.0,
    "code_least_input": 25_700.0,
    "code_least_output": 250.0,
}
_HORIZONTAL: Final[Mapping[str, float]] = {
    "code_variation": 0.80,
    "mooncake_variation": 0.16,
    "code_correlation": 0.95,
    "conversation_correlation": 0.29,
}


def trace_statistics(traces: Path | None) -> Experiment:
    """Return the experiment, one run over three files."""
    if traces is None:
        return Experiment(_NAME, (R10, R11), (), without_traces((R10, R11)))
    return Experiment(_NAME, (R10, R11), (Run(f"{_NAME}/all", statistics, (str(traces),), 2.0),), judge)


def statistics(traces: str) -> Figures:
    """Compute tokens per minute. Raise WorkloadError."""
    root = Path(traces)
    code = load_per_minute(CODE.load(root).requests)
    conversation = load_per_minute(CONVERSATION.load(root).requests)
    # Section 7.1 serves only the first ten minutes; section 3.1 describes the whole hour.
    mooncake_load = load_per_minute(load_mooncake(root / _MOONCAKE, Clip()).requests)
    correlations = (code.correlation(), conversation.correlation())
    return {
        "code_peak_input": float(code.prompt_tokens.max()),
        "code_peak_output": float(code.output_tokens[code.prompt_tokens.argmax()]),
        "code_least_input": float(code.prompt_tokens.min()),
        "code_least_output": float(code.output_tokens[code.prompt_tokens.argmin()]),
        "code_variation": code.prompt_variation(),
        "mooncake_variation": mooncake_load.prompt_variation(),
        "code_correlation": correlations[0] or 0.0,
        "conversation_correlation": correlations[1] or 0.0,
    }


def judge(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Judge R10 and R11: each number must be within a third."""
    found = figures[f"{_NAME}/all"]
    vertical, horizontal = (
        {name: number(found, name) for name in paper} for paper in (_VERTICAL, _HORIZONTAL)
    )
    return (
        _numbers(
            R10,
            f"{vertical['code_peak_input'] / 1e3:.1f}K / {vertical['code_peak_output'] / 1e3:.1f}K, "
            f"{vertical['code_least_input'] / 1e3:.1f}K / {vertical['code_least_output'] / 1e3:.2f}K",
            vertical,
            _VERTICAL,
        ),
        _numbers(
            R11,
            f"{horizontal['code_variation']:.2f}, {horizontal['mooncake_variation']:.2f}; "
            f"{horizontal['code_correlation']:.2f}, {horizontal['conversation_correlation']:.2f}",
            horizontal,
            _HORIZONTAL,
        ),
    )


def _numbers(claim: Claim, ours: str, found: Mapping[str, float], paper: Mapping[str, float]) -> Finding:
    off = max(paper, key=lambda name: abs(found[name] / paper[name] - 1.0))
    return Finding(
        claim.claim_id,
        ours,
        weakest(judge_value(found[name], expected) for name, expected in paper.items()),
        f"minutes without requests are left out; largest error: {off.replace('_', ' ')}, "
        f"{found[off] / paper[off] - 1.0:+.0%}. BurstGPT's hour is not stated",
        found,
    )
