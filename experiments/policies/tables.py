"""Tables of `bench-policies`: figures by scenario, and our policy against the best paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rich.table import Table

from experiments.policies.contestants import ALL, PAPERS
from experiments.policies.outcome import Outcome
from simulator.estimate import estimate

Figure = Callable[[Outcome], float]
# Title, figure, 1 if higher is better, otherwise -1; decimals.
COLUMNS: Final[tuple[tuple[str, Figure, int, int], ...]] = (
    ("goodput req/s", lambda o: o.goodput_per_s, 1, 2),
    ("in SLO %", lambda o: 100 * o.attained, 1, 1),
    ("TTFT P99 s", lambda o: o.ttft_p99_s, -1, 2),
    ("TTFT mean s", lambda o: o.ttft_mean_s, -1, 2),
    ("TPOT P99 ms", lambda o: 1e3 * o.tpot_p99_s, -1, 1),
)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95% confidence interval; NaN for one value."""
    found = estimate(values)
    return found.mean, math.nan if found.half_width is None else found.half_width


def group_table(ground: str, outcomes: Sequence[Outcome]) -> Table:
    """Return all policies at all rates of one scenario; the best mean of each column is marked with *."""
    table = Table(title=f"{ground}: mean of seeds, ± 95% confidence", title_justify="left")
    table.add_column("rate")
    table.add_column("policy", no_wrap=True)
    for title, *_ in COLUMNS:
        table.add_column(title, justify="right")
    for share in sorted({o.share for o in outcomes}):
        rows = [o for o in outcomes if o.share == share]
        rate = f"{share:.0%}: {rows[0].rate_per_s:.3g}/s"
        cells = {
            policy: [interval([figure(o) for o in rows if o.policy == policy]) for _, figure, _, _ in COLUMNS]
            for policy in ALL
        }
        best = [
            max(better * cells[policy][n][0] for policy in ALL) for n, (_, _, better, _) in enumerate(COLUMNS)
        ]
        for policy in ALL:
            shown = [
                f"{mean:.{digits}f} ±{half:.{digits}f}{'*' if better * mean >= best[n] else ' '}"
                for n, ((mean, half), (_, _, better, digits)) in enumerate(
                    zip(cells[policy], COLUMNS, strict=True)
                )
            ]
            name = policy.rpartition(":")[2]
            table.add_row(rate if policy == ALL[0] else "", name, *shown, end_section=policy == ALL[-1])
    return table


def verdict(difference: float, half: float, better: int) -> str:
    """Interpret a paired difference: ahead or behind only if its interval does not contain zero."""
    if difference == 0.0 or math.isnan(half) or abs(difference) <= half:
        return "even"
    return "ahead" if difference * better > 0 else "BEHIND"


def paired(ours: str, rival: str, rows: Sequence[Outcome], figure: Figure) -> tuple[float, float]:
    """Return the mean of `ours` minus `rival`, paired by seed at one rate, and the half-width of its 95%
    interval."""
    values_by_seed = {
        policy: {o.seed: figure(o) for o in rows if o.policy == policy} for policy in (ours, rival)
    }
    return interval([values_by_seed[ours][seed] - value for seed, value in values_by_seed[rival].items()])


def rivals_table(ours: str, outcomes: Sequence[Outcome]) -> Table:
    """Compare `ours` with each paper's policy, in SLO attainment and tail TTFT."""
    table = Table(title=f"{ours} against each: in SLO, TTFT P99", title_justify="left")
    for heading in ("scenario", "rate", *PAPERS):
        table.add_column(heading, no_wrap=True)
    columns_ = [column for column in COLUMNS if column[0] in ("in SLO %", "TTFT P99 s")]
    for row_head, rows in _by_rate(outcomes):
        cells = (
            ", ".join(
                verdict(*paired(ours, rival, rows, figure), better) for _, figure, better, _ in columns_
            )
            for rival in PAPERS
        )
        table.add_row(*row_head, *cells)
    return table


def summary_table(ours: str, outcomes: Sequence[Outcome]) -> Table:
    """Return `ours` minus the best of the four papers' policies by each figure's mean, paired by seed."""
    table = Table(title=f"{ours} minus the best paper's policy, paired by seed", title_justify="left")
    table.add_column("scenario")
    table.add_column("rate")
    for title, _, _, _ in COLUMNS[1:]:
        table.add_column(title)
    for row_head, rows in _by_rate(outcomes):
        cells: list[str] = []
        for _, figure, better, digits in COLUMNS[1:]:
            means = {p: statistics.fmean(figure(o) for o in rows if o.policy == p) for p in PAPERS}
            rival = max(PAPERS, key=lambda p: better * means[p])
            difference, half = paired(ours, rival, rows, figure)
            cells.append(
                f"{difference:+.{digits}f} ±{half:.{digits}f} vs {rival}: {verdict(difference, half, better)}"
            )
        table.add_row(*row_head, *cells)
    return table


def _by_rate(outcomes: Sequence[Outcome]) -> Iterator[tuple[tuple[str, str], list[Outcome]]]:
    """Yield the outcomes of each scenario and rate, with the first cells of their row: a scenario is named
    once."""
    for ground in dict.fromkeys(o.ground for o in outcomes):
        shares = sorted({o.share for o in outcomes if o.ground == ground})
        for share in shares:
            rows = [o for o in outcomes if o.ground == ground and o.share == share]
            yield (ground if share == shares[0] else "", f"{share:.0%}"), rows
