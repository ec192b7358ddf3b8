"""All experiments, and the selection of those a user wants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from simulator.claims import ares, arrow, cascade, pascal
from simulator.claims.base import WHOLE, Claim, Effort, Experiment, Figures, Finding
from simulator.parallel import Progress, Task, run_tasks


class UnknownClaimError(ValueError):
    """Unknown claim or paper; the message lists the known ones."""


@dataclass(frozen=True, slots=True)
class CheckedClaim:
    """A claim and its finding."""

    claim: Claim
    finding: Finding


def experiments(traces: Path | None = None, effort: Effort = WHOLE) -> list[Experiment]:
    """Return the experiments of all papers. `traces` is the directory of public traces that some of Arrow's
    need."""
    return [
        *pascal.experiments(effort),
        *ares.experiments(effort),
        *arrow.experiments(traces, effort),
        *cascade.experiments(effort),
    ]


def claims_of(chosen: Iterable[Experiment]) -> list[Claim]:
    """Return the claims in the order of the experiments."""
    return [claim for experiment in chosen for claim in experiment.claims]


def select(everything: Sequence[Experiment], wanted: Sequence[str]) -> tuple[list[Experiment], set[str]]:
    """Return the experiments that the wanted claims need, and the ids of those claims.

    `wanted` are ids or papers, case-insensitive; empty selects all. Raise UnknownClaimError.
    """
    claims = claims_of(everything)
    ids = {claim.claim_id for claim in claims}
    if not wanted:
        return list(everything), ids
    chosen: set[str] = set()
    for word in wanted:
        matching = {c.claim_id for c in claims if word.lower() in (c.claim_id.lower(), c.paper.lower())}
        if not matching:
            papers = ", ".join(dict.fromkeys(claim.paper for claim in claims))
            raise UnknownClaimError(
                f"unknown claim or paper {word!r}; papers: {papers}; --list shows the claims"
            )
        chosen |= matching
    needed = [e for e in everything if chosen & {claim.claim_id for claim in e.claims}]
    return needed, chosen


def check(
    chosen: Sequence[Experiment],
    *,
    processes: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[CheckedClaim]:
    """Run experiments on several processes and judge their claims, in order. Raise TaskError.

    Raise ValueError for an experiment that does not judge exactly the claims it names.
    """
    tasks = [
        Task(_name(experiment, run.name), run.measure, run.arguments, run.cost_s)
        for experiment in chosen
        for run in experiment.runs
    ]
    figures = run_tasks(tasks, processes=processes, progress=progress)
    return [checked for experiment in chosen for checked in _judged(experiment, figures)]


def _judged(experiment: Experiment, figures: Mapping[str, Figures]) -> list[CheckedClaim]:
    own = {run.name: figures[_name(experiment, run.name)] for run in experiment.runs}
    findings = {finding.claim_id: finding for finding in experiment.judge(own)}
    if set(findings) != {claim.claim_id for claim in experiment.claims}:
        raise ValueError(f"{experiment.name} judges {sorted(findings)}, which are not its claims")
    return [CheckedClaim(claim, findings[claim.claim_id]) for claim in experiment.claims]


def _name(experiment: Experiment, run: str) -> str:
    return f"{experiment.name}: {run}"
