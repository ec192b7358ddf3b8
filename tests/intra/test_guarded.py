"""A batch order of another package with any mistake is asked no more, and never reaches the engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Phase
from tailrace.intra.base import IntraPolicy, JobView, Rank, TokenIntervals
from tailrace.intra.guarded import LATE_IN_A_ROW, Asked, GuardedOrder, guarded, log_mistake, order_asked
from tailrace.intra.orders import Fcfs
from tailrace.intra.registry import UnknownIntraError

JOB = JobView(7, Phase.ANSWERING, 10, 5, 5)
# Each method, what it is asked, and what is said after a mistake.
POINTS: dict[str, tuple[tuple[Any, ...], object]] = {
    "rank": ((JOB,), (7,)),
    "rank_holds": ((JOB,), None),
    "lapses_s": ((JOB,), None),
    "takes_from": (((1, 7), (2, 8)), False),
    "level": (((1, 7),), ()),
    "demoted": ((JOB,), False),
    "keeps_back": (((1, 7), TokenIntervals(1.0, 0.1, 0.01)), False),
    "prefill_budget": ((100, 3), 97),
}


class Liar(str):
    __slots__ = ()

    def __repr__(self) -> str:
        raise SystemExit(3)


def raising(error: BaseException) -> Callable[..., object]:
    def method(*_: object) -> object:
        raise error

    return method


WRONG = st.sampled_from(
    [
        math.nan,
        math.inf,
        -1,
        "text",
        Liar(),
        [],
        (),
        (1, 8),
        (7.5, math.nan, 7),
        ("a", 7),
        (1 << 200, 7),
        {},
        object(),
        1j,
        1 << 200,
    ]
)
ERRORS = st.sampled_from(
    [ValueError("x"), SystemExit(2), KeyboardInterrupt(), RecursionError(), GeneratorExit(), MemoryError()]
)
# Which of WRONG each method may return.
ALLOWED: dict[str, Callable[[Any], bool]] = {
    "lapses_s": lambda value: value == -1,
    "level": lambda value: value in ((), (1, 8)),
}


def wrong_order(point: str, method: Callable[..., object]) -> IntraPolicy:
    order = Fcfs()
    setattr(order, point, method)
    return order


@given(st.sampled_from([*POINTS]), WRONG)
def test_a_wrong_answer_is_the_last_one_asked_for(point: str, wrong: object) -> None:
    if (allowed := ALLOWED.get(point)) is not None and type(wrong) in (int, tuple) and allowed(wrong):
        return
    check(guard(wrong_order(point, lambda *_: wrong)), point)


@given(st.sampled_from([*POINTS]), ERRORS)
def test_so_is_an_exception(point: str, error: BaseException) -> None:
    check(guard(wrong_order(point, raising(error))), point)


def guard(order: IntraPolicy) -> GuardedOrder:
    return GuardedOrder("mine", order, log_mistake)


def check(order: GuardedOrder, point: str) -> None:
    arguments, default = POINTS[point]
    assert getattr(order, point)(*arguments) == default
    assert order.mistake.startswith(f"{point}: ")
    assert not order.preemptive and not order.receives_on_host and not order.may_keep_back
    for other, (those, said) in POINTS.items():
        assert getattr(order, other)(*those) == said


def test_a_budget_of_none_is_a_mistake_only_without_decodes() -> None:
    order = guard(wrong_order("prefill_budget", lambda *_: 0))
    assert order.prefill_budget(100, 3) == 0 and not order.mistake
    assert order.prefill_budget(0, 0) == 0 and not order.mistake
    stuck = guard(wrong_order("prefill_budget", lambda *_: 0))
    assert stuck.prefill_budget(100, 0) == 100
    assert stuck.mistake == "prefill_budget: not what IntraPolicy.prefill_budget returns: 0"


def test_ranks_are_of_one_length() -> None:
    class Growing(Fcfs):
        ranks: ClassVar = [(1, 7), (1, 2, 7)]

        def rank(self, job: JobView) -> Rank:
            rank: Rank = self.ranks[job.output_tokens]
            return rank

    order = guard(Growing())
    assert order.rank(JobView(7, Phase.PREFILL, 10, 0, 0)) == (1, 7)
    assert order.rank(JobView(7, Phase.PREFILL, 10, 1, 0)) == (7,)
    assert "not what IntraPolicy.rank returns" in order.mistake


def test_a_flag_in_a_rank_is_a_number() -> None:
    class Prefilling(Fcfs):
        def rank(self, job: JobView) -> Rank:
            return (job.phase is Phase.PREFILL, job.arrival)

    order = guard(Prefilling())
    assert order.rank(JOB) == (0, 7) and not order.mistake


def test_a_wrong_rank_is_shown() -> None:
    class Alike(Fcfs):
        def rank(self, job: JobView) -> Rank:
            return (1, 2)

    order = guard(Alike())
    order.rank(JOB)
    assert order.mistake == "rank: not what IntraPolicy.rank returns: (1, 2)"


def test_late_answers_in_a_row_are_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(x * 0.1 for x in range(100))
    monkeypatch.setattr("tailrace.intra.guarded.time.perf_counter", lambda: next(times))
    order = guard(Fcfs())
    for _ in range(LATE_IN_A_ROW):
        assert not order.mistake
        order.demoted(JOB)
    assert order.mistake == "demoted: took 0.1 s (allowed: 0.05 s)"


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("watermark", 1.5),
        ("watermark", "a"),
        ("pass_over", math.nan),
        ("preemptive", 1),
        ("receives_on_host", None),
        ("may_keep_back", 0),
        ("watermark", property(raising(SystemExit(1)))),
    ],
)
def test_a_wrong_attribute_is_named(attribute: str, value: object) -> None:
    class Wrong(Fcfs):
        def __init__(self) -> None:
            pass

    setattr(Wrong, attribute, value)
    with pytest.raises(UnknownIntraError, match=r"order 'mine': "):
        guarded("mine", Wrong(), log_mistake)


def test_orders_of_this_package_are_asked_directly() -> None:
    order = Fcfs()
    assert guarded("fcfs", order, log_mistake) is order and guarded("vllm", None, log_mistake) is None


def test_a_question_of_another_thread_does_not_hide_the_one_that_hangs() -> None:
    """An engine asks in its thread, and the event loop for statistics."""
    going, asked = threading.Event(), threading.Event()

    class Hanging(Fcfs):
        def rank(self, job: JobView) -> Rank:
            asked.set()
            assert going.wait(60)
            return super().rank(job)

    order = guard(Hanging())
    thread = threading.Thread(target=order.rank, args=(JOB,))
    thread.start()
    try:
        assert asked.wait(60)
        order.demoted(JOB)
        assert order_asked() == Asked("mine", "rank", thread.native_id or 0)
        assert order_asked() is order_asked()
    finally:
        going.set()
        thread.join()
    assert order_asked() is None
