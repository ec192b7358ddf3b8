"""All experiments, and the selection of those a user wants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.claims import ares, arrow, cascade, pascal
from experiments.claims.base import WHOLE, Claim, Effort, Experiment, Figures, Finding, Run, RunFailedError
from experiments.claims.verdicts import judged
from simulator.parallel import Task, TaskError, TaskProgress, run_tasks


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


def runs_of(chosen: Iterable[Experiment]) -> dict[str, Run]:
    """Return all runs of experiments by a name that is distinct among them."""
    return {_name(experiment, run.name): run for experiment in chosen for run in experiment.runs}


def check(
    chosen: Sequence[Experiment],
    *,
    processes: int | None = None,
    progress: Callable[[TaskProgress], None] | None = None,
    known: Mapping[str, Figures] | None = None,
    measured: Callable[[Run, Figures], None] | None = None,
) -> list[CheckedClaim]:
    """Run experiments on several processes and judge their claims, in order.

    `known` are figures of runs, by the names of `runs_of`, that need not be computed; `measured` is called
    with those of each other run as they are made. A run that fails costs the claims that need its figures,
    and a judge that fails its own: these are "could not be judged".
    """
    runs, figures = runs_of(chosen), dict(known or {})
    tasks = [
        Task(name, run.measure, run.arguments, run.cost_s)
        for name, run in runs.items()
        if name not in figures
    ]
    failures: dict[str, str] = {}

    def succeeded(name: str, result: Figures) -> None:
        if measured is not None:
            measured(runs[name], result)

    def failed(error: TaskError) -> None:
        failures[error.name] = str(error)

    figures |= run_tasks(tasks, processes=processes, progress=progress, succeeded=succeeded, failed=failed)
    return [checked for experiment in chosen for checked in _judged(experiment, figures, failures)]


class _Outcomes(Mapping[str, Figures]):
    """The figures of an experiment's runs by their own names. A failed run is among them, and asking for its
    figures raises RunFailedError."""

    def __init__(
        self, experiment: Experiment, figures: Mapping[str, Figures], failures: Mapping[str, str]
    ) -> None:
        self._names = {run.name: _name(experiment, run.name) for run in experiment.runs}
        self._figures = figures
        self._failures = failures

    def __getitem__(self, run: str) -> Figures:
        name = self._names[run]
        if name in self._failures:
            raise RunFailedError(self._failures[name])
        return self._figures[name]

    def __contains__(self, run: object) -> bool:
        return run in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _judged(
    experiment: Experiment, figures: Mapping[str, Figures], failures: Mapping[str, str]
) -> list[CheckedClaim]:
    def judge() -> Sequence[Finding]:
        found = experiment.judge(_Outcomes(experiment, figures, failures))
        if {finding.claim_id for finding in found} != {claim.claim_id for claim in experiment.claims}:
            names = sorted(finding.claim_id for finding in found)
            raise ValueError(f"{experiment.name} judges {names}, which are not its claims")
        return found

    findings = {finding.claim_id: finding for finding in judged(experiment.claims, judge)}
    return [CheckedClaim(claim, findings[claim.claim_id]) for claim in experiment.claims]


def _name(experiment: Experiment, run: str) -> str:
    return f"{experiment.name}: {run}"
