"""Tables of `bench-shards`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.table import Table

from experiments.shards.measure import Outcome
from experiments.shards.ways import ONE
from simulator.estimate import Estimate, estimate

Figure = Callable[[Outcome], float]
# Title, figure, decimals.
_COLUMNS: Final[tuple[tuple[str, Figure, int], ...]] = (
    ("in SLO %", lambda o: 100 * o.attained, 2),
    ("goodput/s", lambda o: o.goodput_per_s, 0),
    ("TTFT P50 s", lambda o: o.ttft_p50_s, 3),
    ("TTFT P99 s", lambda o: o.ttft_p99_s, 2),
    ("first token P99 s", lambda o: o.first_token_p99_s, 2),
    ("TPOT P99 ms", lambda o: 1e3 * o.tpot_p99_s, 1),
    ("imbalance", lambda o: o.imbalance, 3),
    ("cached %", lambda o: 100 * o.cached, 1),
    ("calls", lambda o: o.calls, 2),
)


def text(found: Estimate, places: int, sign: str = "") -> str:
    """Return a mean with the half-width of its interval, if it has one."""
    half = "" if found.half_width is None else f" ±{found.half_width:.{places}f}"
    return f"{found.mean:{sign}.{places}f}{half}"


def groups(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Return the outcomes that are compared with each other: of one workload, fleet, policy and load."""
    found: dict[tuple[str, int, str, float], list[Outcome]] = {}
    for outcome in outcomes:
        case = outcome.case
        found.setdefault((case.workload, case.instances, case.policy, case.load), []).append(outcome)
    return list(found.values())


def change(ours: Sequence[Outcome], base: Sequence[Outcome], figure: Figure) -> Estimate:
    """Return the change of a figure in percent, paired by seed. Raise KeyError for a seed that `base`
    lacks."""
    base_values = {outcome.case.seed: figure(outcome) for outcome in base}
    return estimate([100 * (figure(outcome) / base_values[outcome.case.seed] - 1) for outcome in ours])


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return the table of one group: a row per way, with the change against one scheduler."""
    case = outcomes[0].case
    result = Table(
        title=f"{case.workload}, {case.instances} instances, {case.policy} at {case.load:.0%} "
        f"({case.rate_per_s:.0f} requests/s): mean of seeds, ± 95% confidence",
        title_justify="left",
    )
    result.add_column("way", no_wrap=True)
    for title, _, _ in _COLUMNS:
        result.add_column(title, justify="right")
    result.add_column("TTFT P99, change %", justify="right")
    base = [outcome for outcome in outcomes if outcome.case.way == ONE]
    for way in dict.fromkeys(outcome.case.way for outcome in outcomes):
        ours = [outcome for outcome in outcomes if outcome.case.way == way]
        cells = [text(estimate([figure(o) for o in ours]), places) for _, figure, places in _COLUMNS]
        compared = "" if way == ONE or not base else text(change(ours, base, lambda o: o.ttft_p99_s), 1, "+")
        result.add_row(way.name, *cells, compared)
    return result
