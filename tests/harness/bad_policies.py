"""Policies with mistakes, as a package that is installed beside the schedulers."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any, Final

from tailrace.actions import Migrate, Place, SetStages
from tailrace.cluster import Phase, Stage
from tailrace.intra.base import JobView, Rank
from tailrace.intra.orders import Fcfs
from tailrace.policy.least_loaded import LeastLoaded


class ForgotReturn(LeastLoaded):
    """Places nowhere."""

    def place(self, view: Any, arrival: Any, now: float) -> Any:
        super().place(view, arrival, now)


class ReturnsText(LeastLoaded):
    """Places with a word."""

    def place(self, view: Any, arrival: Any, now: float) -> Any:
        return next(iter(view.instances))


class AlsoAnything(LeastLoaded):
    """Places, and does anything besides."""

    def place(self, view: Any, arrival: Any, now: float) -> Any:
        return Place(next(iter(view.instances)), also=(object(),))  # type: ignore[arg-type]


class LeavesTheProcess(LeastLoaded):
    """Exits when asked."""

    def place(self, view: Any, arrival: Any, now: float) -> Any:
        sys.exit(3)

    def on_tick(self, view: Any, now: float) -> Any:
        raise KeyboardInterrupt

    tick_interval_s = 0.2


class CancelsTheTask(LeastLoaded):
    """Raises what asyncio cancels tasks by."""

    tick_interval_s = 0.2

    def on_tick(self, view: Any, now: float) -> Any:
        raise asyncio.CancelledError


class RaisesWhileIterated(LeastLoaded):
    """Fails after the first action."""

    tick_interval_s = 0.2

    def on_tick(self, view: Any, now: float) -> Any:
        yield Migrate("r", "a", "b", "x")
        raise SystemExit


class EndlessActions(LeastLoaded):
    """Never stops yielding."""

    tick_interval_s = 0.2

    def on_tick(self, view: Any, now: float) -> Any:
        return itertools.repeat(Migrate("r", "a", "b", "x"))


class OneActionInsteadOfAList(LeastLoaded):
    """Forgot the brackets."""

    tick_interval_s = 0.2

    def on_tick(self, view: Any, now: float) -> Any:
        return Migrate("r", "a", "b", "x")


class InvalidStages(LeastLoaded):
    """Sets stages that contradict themselves."""

    tick_interval_s = 0.2

    def on_tick(self, view: Any, now: float) -> Any:
        return [SetStages((Stage(5, 1, ("nope",)),))]


class TickLongerThanItsInterval(LeastLoaded):
    """Has no time."""

    tick_interval_s = 0.05

    def on_tick(self, view: Any, now: float) -> Any:
        time.sleep(0.08)
        return ()


class SlowPlace(LeastLoaded):
    """Takes ten seconds."""

    def place(self, view: Any, arrival: Any, now: float) -> Any:
        time.sleep(10)
        return super().place(view, arrival, now)


class NeverReturnsFromPlace(LeastLoaded):
    """Spins."""

    def place(self, view: Any, arrival: Any, now: float) -> Any:
        while True:
            pass


class NeverReturnsFromTick(LeastLoaded):
    """Waits for nothing."""

    tick_interval_s = 0.2

    def on_tick(self, view: Any, now: float) -> Any:
        time.sleep(1e6)


class WrongInterval(LeastLoaded):
    """Cannot be set: its interval is a word."""

    tick_interval_s = "1"  # type: ignore[assignment]


class ExitsWhenMade(LeastLoaded):
    """Cannot be set: its constructor exits."""

    def __init__(self) -> None:
        sys.exit(4)


BAD_POLICIES = {
    kind.__name__: kind
    for kind in (
        ForgotReturn,
        ReturnsText,
        AlsoAnything,
        LeavesTheProcess,
        CancelsTheTask,
        RaisesWhileIterated,
        EndlessActions,
        OneActionInsteadOfAList,
        InvalidStages,
        TickLongerThanItsInterval,
        SlowPlace,
        NeverReturnsFromPlace,
        NeverReturnsFromTick,
        WrongInterval,
        ExitsWhenMade,
    )
}

REFUSED: Final = frozenset({"WrongInterval", "ExitsWhenMade"})
"""Those that `set policy` refuses."""

HANGING: Final = frozenset({"SlowPlace", "NeverReturnsFromPlace", "NeverReturnsFromTick"})
"""Those for which a scheduler restarts, under the same process ID."""


class RaisesInRank(Fcfs):
    """A batch order that fails at every request."""

    def rank(self, job: JobView) -> Rank:
        raise KeyError(job.arrival)


class RanksAlike(Fcfs):
    """Forgot that ranks must be distinct."""

    def rank(self, job: JobView) -> Rank:
        return (int(job.phase is Phase.PREFILL),)


class NoBudget(Fcfs):
    """Forgot to return it."""

    def prefill_budget(self, step_tokens: int, decoding: int) -> int:
        return None  # type: ignore[return-value]


class NeverReturnsFromRank(Fcfs):
    """Looks for something that is not there."""

    def rank(self, job: JobView) -> Rank:
        while True:
            pass


BAD_ORDERS = {kind.__name__: kind for kind in (RaisesInRank, RanksAlike, NoBudget, NeverReturnsFromRank)}


class ServesByRaisesInRank(LeastLoaded):
    """Has that batch order."""

    batch_order = RaisesInRank.__name__


class ServesByRanksAlike(LeastLoaded):
    """Has that batch order."""

    batch_order = RanksAlike.__name__


class ServesByNoBudget(LeastLoaded):
    """Has that batch order."""

    batch_order = NoBudget.__name__


class ServesByNeverReturnsFromRank(LeastLoaded):
    """Has that batch order."""

    batch_order = NeverReturnsFromRank.__name__


ORDERED: Final = ("ServesByRaisesInRank", "ServesByRanksAlike", "ServesByNoBudget")
"""Policies that place well, with a batch order that makes a mistake on workers."""

HANGING_ORDER: Final = "ServesByNeverReturnsFromRank"
"""One whose batch order does not return."""


def install(folder: Path) -> str:
    """Write what an installed package with these policies has; return the PYTHONPATH that finds it."""
    about = folder / "bad_policies-1.0.dist-info"
    about.mkdir(parents=True)
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: bad_policies\nVersion: 1.0\n")
    lines = ["[tailrace.policies]"]
    lines += [f"{name} = {__name__}:{name}" for name in (*BAD_POLICIES, *ORDERED, HANGING_ORDER)]
    lines += ["[tailrace.batch_orders]", *(f"{name} = {__name__}:{name}" for name in BAD_ORDERS), ""]
    about.joinpath("entry_points.txt").write_text("\n".join(lines))
    return f"{folder}:{Path(__file__).parents[1]}"
