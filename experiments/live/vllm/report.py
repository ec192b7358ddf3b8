"""Report a comparison as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from experiments.live.vllm.figures import Figures, ratio

_LABELS = {
    "ttft_p50_s": "TTFT, median, s",
    "ttft_p90_s": "TTFT, P90, s",
    "first_p50_s": "first token of any kind, median, s",
    "first_p90_s": "first token of any kind, P90, s",
    "attained": "SLO attainment",
    "moved": "migrations committed",
    "flips": "pool flips seen in etcd",
    "flip_stall_s": "longest stall in which a pool flipped, s",
    "longest_gap_s": "longest gap in a stream, s",
    "pause_ms_max": "longest pause of a migration, ms",
    "kv_variance_mean": "variance of KV use",
    "preemptions": "preemptions",
    "offers_taken": "offers taken by a bidder",
    "offers_kept": "offers without a taker",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs of one comparison. `compared`: figures in the table; `ours`: the contestant whose ratios are
    shown."""

    name: str
    title: str
    ours: str
    # Requests per second (of the burst, if there is one).
    rate: float
    slo: str
    compared: Sequence[str]
    runs: Sequence[Figures]

    @property
    def passed(self) -> bool:
        """Whether every answer of every run arrived and equals the undisturbed one."""
        return all(run.passed for run in self.runs)

    @property
    def answers(self) -> tuple[int, int]:
        """The number of equal answers, and of all."""
        return sum(run.equal for run in self.runs), sum(run.requests for run in self.runs)

    def mean(self, contestant: str, figure: str) -> float | None:
        """Return the mean over seeds; None if no run has the figure."""
        values = [_value(run, figure) for run in self.runs if run.contestant == contestant]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    @property
    def contestants(self) -> list[str]:
        """The contestants in the order of their first run, ours last."""
        found = dict.fromkeys(run.contestant for run in self.runs)
        return [name for name in found if name != self.ours] + [self.ours]

    def ratios(self) -> dict[str, dict[str, float | None]]:
        """Return ratios ours / theirs of the means over seeds, by rival and figure."""
        return {
            rival: {
                figure: ratio(ours, theirs)
                for figure in self.compared
                if (ours := self.mean(self.ours, figure)) is not None
                and (theirs := self.mean(rival, figure)) is not None
            }
            for rival in self.contestants[:-1]
        }

    def json(self) -> dict[str, object]:
        """Return the comparison for benchmarks/results."""
        equal, requests = self.answers
        return {
            "comparison": self.title,
            "rate_per_s": self.rate,
            "slo": self.slo,
            "answers_equal": equal,
            "answers": requests,
            "ratios_ours_to": self.ratios(),
            "runs": [asdict(run) for run in self.runs],
        }

    def table(self) -> Table:
        """Return one row per contestant, with the ratio of ours to it below each figure."""
        equal, requests = self.answers
        seeds = ", ".join(map(str, dict.fromkeys(run.seed for run in self.runs)))
        more = "".join(
            f"; {name.replace('_', ' ')}: {_number(value)}" for name, value in self.runs[0].more.items()
        )
        table = Table(
            title=f"{self.title}: {equal} of {requests} answers equal",
            caption=f"{self.rate:.2f} requests/s, seeds {seeds}; means over seeds, and {self.ours} / theirs; "
            f"SLO: {self.slo}{more}",
        )
        table.add_column("contestant")
        for figure in self.compared:
            table.add_column(_label(figure), justify="right")
        ratios = self.ratios()
        for name in self.contestants:
            cells = [_number(self.mean(name, figure)) for figure in self.compared]
            if name in ratios:
                shown = (ratios[name].get(figure) for figure in self.compared)
                cells = [f"{cell}\n({_number(value)})" for cell, value in zip(cells, shown, strict=True)]
            table.add_row(name, *cells)
        return table


def summary(comparisons: Sequence[Comparison]) -> Table:
    """Return one row per comparison, with each contestant's SLO attainment: it shows at which loads a policy
    gains."""
    table = Table(title="SLO attainment; means over seeds", show_lines=True)
    for heading in ("comparison", "requests/s", "contestants, best first", "answers equal"):
        table.add_column(heading)
    for each in comparisons:
        share_in_slo = {name: each.mean(name, "attained") or 0.0 for name in each.contestants}
        ranked = sorted(share_in_slo, key=lambda name: -share_in_slo[name])
        equal, requests = each.answers
        shown = ", ".join(f"{name} {share_in_slo[name]:.2f}" for name in ranked)
        table.add_row(each.name, f"{each.rate:.2f}", shown, f"{equal} of {requests}")
    return table


def _value(run: Figures, figure: str) -> float | None:
    if figure == "attained":
        return run.attained / max(1, run.requests)
    if figure == "moved":
        return float(sum(run.migrations.values()))
    name, _, key = figure.partition(":")
    if key:
        inside = run.ttft_by_reasoning.get(key)
        return None if inside is None else inside[2]
    return float(getattr(run, name))


def _label(figure: str) -> str:
    name, _, key = figure.partition(":")
    return f"TTFT, P90, reasoning of {key} tokens, s" if key else _LABELS.get(name, name)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
