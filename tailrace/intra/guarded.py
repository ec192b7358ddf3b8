"""Ask a batch order of another package so that its mistakes do not reach the engine.

An order is asked within the engine's step: what it raises would end the engine, and ranks that are not
distinct would lose a waiting request. So each answer is checked here. After the first mistake the order is
asked no more: `mistake` says why, and the engine replaces the order by its own before the next step. Until
then the answers are those of first come, first served. A simulation ends at a mistake.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeGuard, TypeVar

from tailrace.intra.base import PASS_OVER_MAX, IntraPolicy, JobView, Rank, TokenIntervals
from tailrace.intra.registry import INTRA_POLICIES, UnknownIntraError
from tailrace.plugins import describe_error

log = logging.getLogger(__name__)

T = TypeVar("T")

BUDGET_S: Final = 0.05
"""Longest that one answer may take, as of a fleet's policy when it places: several steps of an engine."""
LATE_IN_A_ROW: Final = 5
"""So many late answers in a row are a mistake; a few can be the machine's."""
# More than any time or arrival needs; longer numbers would make comparisons slow.
_RANK_BITS: Final = 128
# Elements of a tuple that an error shows.
_SHOWN_MAX: Final = 8


class Asked(NamedTuple):
    """A question that an order is answering."""

    order: str
    point: str
    # Native id of the thread that asks.
    thread: int


# By thread: an engine asks in its own, and the event loop for its statistics.
_asked: dict[int, Asked] = {}


def order_asked() -> Asked | None:
    """Return the oldest question that an order of this process is answering now, an object of its own for
    each, or None."""
    return next(iter(list(_asked.values())), None)


class GuardedOrder(IntraPolicy):
    """Checks each answer of an order. Attributes are read once, when it is created."""

    def __init__(
        self,
        name: str,
        order: IntraPolicy,
        on_mistake: Callable[[str], None],
        budget_s: float = BUDGET_S,
    ) -> None:
        """`on_mistake` is called once, with the name and the mistake. Raise UnknownIntraError."""
        self._name = name
        self._order = order
        self._on_mistake = on_mistake
        self._budget_s = budget_s
        # Elements of a rank; None before the first.
        self._length: int | None = None
        self._late_in_a_row = 0
        try:
            self.preemptive = _flag("preemptive", order.preemptive)
            self.may_keep_back = _flag("may_keep_back", order.may_keep_back)
            self.receives_on_host = _flag("receives_on_host", order.receives_on_host)
            self.watermark = _share("watermark", order.watermark, 1.0)
            self.pass_over = _share("pass_over", order.pass_over, PASS_OVER_MAX)
        # They can be properties, which raise anything.
        except BaseException as error:
            raise UnknownIntraError(f"order {name!r}: {describe_error(error)}") from error

    def rank(self, job: JobView) -> Rank:
        """See IntraPolicy."""
        return self._ask(
            "rank", lambda: self._order.rank(job), lambda rank: self._is_rank(rank, job), (job.arrival,)
        )

    def rank_holds(self, job: JobView) -> int | None:
        """See IntraPolicy."""
        return self._ask("rank_holds", lambda: self._order.rank_holds(job), _is_holds, None)

    def lapses_s(self, job: JobView) -> float | None:
        """See IntraPolicy."""
        return self._ask("lapses_s", lambda: self._order.lapses_s(job), _is_time, None)

    def takes_from(self, rank: Rank, victim: Rank) -> bool:
        """See IntraPolicy."""
        return self._ask("takes_from", lambda: self._order.takes_from(rank, victim), _is_bool, False)

    def level(self, rank: Rank) -> Rank:
        """See IntraPolicy."""
        return self._ask("level", lambda: self._order.level(rank), _is_numbers, ())

    def keeps_back(self, rank: Rank, intervals: TokenIntervals) -> bool:
        """See IntraPolicy."""
        return self._ask("keeps_back", lambda: self._order.keeps_back(rank, intervals), _is_bool, False)

    def demoted(self, job: JobView) -> bool:
        """See IntraPolicy."""
        return self._ask("demoted", lambda: self._order.demoted(job), _is_bool, False)

    def prefill_budget(self, step_tokens: int, decoding: int) -> int:
        """See IntraPolicy."""
        return self._ask(
            "prefill_budget",
            lambda: self._order.prefill_budget(step_tokens, decoding),
            # None beside nothing: no request would ever run again.
            lambda budget: _is_budget(budget) and (budget > 0 or decoding > 0 or step_tokens == 0),
            max(0, step_tokens - decoding),
        )

    def _is_rank(self, rank: object, job: JobView) -> bool:
        if not _is_numbers(rank) or not rank or rank[-1] != job.arrival:
            return False
        self._length = self._length or len(rank)
        return len(rank) == self._length

    def _ask(self, point: str, call: Callable[[], Any], is_valid: Callable[[Any], bool], default: T) -> T:
        """Return the order's answer, or `default` if it is wrong or one before was."""
        if self.mistake:
            return default
        thread = threading.get_ident()
        began_s = time.perf_counter()
        _asked[thread] = Asked(self._name, point, threading.get_native_id())
        try:
            answer: T = call()
            wrong = "" if is_valid(answer) else f"not what IntraPolicy.{point} returns: {_shown(answer)}"
        # It is another package's, and may raise anything, SystemExit included.
        except BaseException as error:  # noqa: BLE001 - see above
            wrong = describe_error(error)
        finally:
            del _asked[thread]
        if wrong:
            return self._fail(f"{point}: {wrong}", default)
        took_s = time.perf_counter() - began_s
        self._late_in_a_row = self._late_in_a_row + 1 if took_s > self._budget_s else 0
        if self._late_in_a_row == LATE_IN_A_ROW:
            return self._fail(f"{point}: took {took_s:.3g} s (allowed: {self._budget_s:g} s)", default)
        return answer

    def _fail(self, mistake: str, default: T) -> T:
        self.mistake = mistake
        self.preemptive = self.may_keep_back = self.receives_on_host = False
        self._on_mistake(f"order {self._name} at {mistake}")
        return default


def guarded(
    name: str, order: IntraPolicy | None, on_mistake: Callable[[str], None], budget_s: float = BUDGET_S
) -> IntraPolicy | None:
    """Return an order whose answers are checked, unless it is one of this package or the engine's own (None).

    The arguments are those of GuardedOrder. Raise UnknownIntraError.
    """
    if order is None or type(order) in INTRA_POLICIES.values():
        return order
    return GuardedOrder(name, order, on_mistake, budget_s)


def log_mistake(mistake: str) -> None:
    """Tell an operator of a mistake, and what the engine does."""
    log.error("%s; the engine's own serves until another policy or other parameters are set", mistake)


def _flag(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{name}: {_shown(value)} is not True or False")
    return value


def _share(name: str, value: object, most: float) -> float:
    if not _is_number(value) or not 0.0 <= value <= most:
        raise ValueError(f"{name}: {_shown(value)} is not from 0 to {most:g}")
    return float(value)


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_number(value: object) -> TypeGuard[int | float]:
    # The types themselves: those of others may do anything when they are compared.
    if type(value) is int or type(value) is bool:
        return value.bit_length() <= _RANK_BITS
    return type(value) is float and math.isfinite(value)


def _is_numbers(value: object) -> TypeGuard[tuple[int | float, ...]]:
    return type(value) is tuple and all(map(_is_number, value))


def _is_holds(value: object) -> bool:
    return value is None or (type(value) is int and _is_number(value) and value >= 1)


def _is_time(value: object) -> bool:
    return value is None or _is_number(value)


def _is_budget(value: object) -> bool:
    return type(value) is int and _is_number(value) and value >= 0


def _shown(value: object) -> str:
    kind = type(value)
    if type(value) is tuple and len(value) <= _SHOWN_MAX:
        return f"({', '.join(map(_shown, value))})"
    shown = kind in (float, type(None)) or _is_number(value)
    return repr(value) if shown else f"a {kind.__name__}"
