"""The requests of one instance as a table, which answers what policies ask about them.

Policies read few of the requests themselves: most decisions compare counts by phase, or lengths. So a table
has a column for each property that they compare, and makes the view of a single request on access.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import Phase, PhaseLoad, RequestState, RequestView
from tailrace.intra.base import QUANTUM_TOKENS
from tailrace.perf.steps import Floats

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
# Arrival time in seconds, and length in tokens.
Prompt = tuple[float, int]

OFF_DEVICE: Final = (RequestState.WAITING, RequestState.PREEMPTED)

T = TypeVar("T", bound=np.generic)


class Reasoning(NamedTuple):
    """How many requests reason; the sums of their arrival times in seconds and of their output tokens."""

    requests: int
    arrivals_s: float
    output_tokens: int

    def plus(self, more: Reasoning) -> Reasoning:
        """Return the sums of both."""
        return Reasoning(
            self.requests + more.requests,
            self.arrivals_s + more.arrivals_s,
            self.output_tokens + more.output_tokens,
        )


class Column(Generic[T]):
    """A property of all requests of a table, made on first access; row n belongs to the n-th request."""

    def __init__(self, dtype: type[T], read: Callable[[RequestView], float]) -> None:
        """`read`: returns the property of one request."""
        self._dtype = dtype
        self._read = read
        self.name = ""

    def __set_name__(self, owner: type[RequestTable], name: str) -> None:
        self.name = name

    def of(self, requests: Iterable[RequestView]) -> NDArray[T]:
        """Return the column of these requests, in their order."""
        return np.array([self._read(request) for request in requests], dtype=self._dtype)

    def __get__(self, table: RequestTable, owner: type[RequestTable]) -> NDArray[T]:
        made = table.columns.get(self.name)
        if made is None:
            made = table.columns[self.name] = read_only(table.make_column(self))
        return made


def read_only(array: NDArray[T]) -> NDArray[T]:
    """Return the array, which cannot be written to from now on: policies and shadows share it, and a write
    would change what the next one decides."""
    array.setflags(write=False)
    return array


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


class RequestTable(Sequence[RequestView]):
    """The requests of an instance at one moment. Immutable, its columns included.

    This class makes everything from views. Where requests come in another form, a subclass makes views and
    columns from it, and only those that are read.
    """

    __slots__ = ("_counted", "_views", "columns")

    prompt_tokens = Column(np.int64, lambda r: r.prompt_tokens)
    output_tokens = Column(np.int64, lambda r: r.output_tokens)
    max_tokens = Column(np.int64, lambda r: r.max_tokens)
    epochs = Column(np.int64, lambda r: r.epoch)
    arrival_s = Column(np.float64, lambda r: r.arrival_s)
    # NaN: no prediction.
    predicted_remaining_tokens = Column(np.float64, lambda r: _or_nan(r.predicted_remaining_tokens))
    in_prefill = Column(np.bool_, lambda r: r.phase is Phase.PREFILL)
    running = Column(np.bool_, lambda r: r.state is RequestState.RUNNING)
    migrating = Column(np.bool_, lambda r: r.migrating)
    # Running, or preempted with KV in host memory.
    with_kv = Column(np.bool_, lambda r: has_kv(r.state, r.host_kv_tokens))

    def __init__(self, views: tuple[RequestView, ...] | None = None) -> None:
        """`views`: the requests; None: a subclass makes them."""
        self._views = views
        # Those made so far.
        self.columns: dict[str, NDArray[Any]] = {}
        # The last counts of all requests.
        self._counted: PhaseLoad | None = None

    # ---- made in another way by subclasses

    def make_views(self) -> tuple[RequestView, ...]:
        """Make the views of all requests, once."""
        raise NotImplementedError

    def make_column(self, column: Column[T]) -> NDArray[T]:
        """Make a column, once."""
        return column.of(self._all())

    @property
    def ids(self) -> Sequence[str]:
        """Return the ids of the requests, in their order."""
        return [request.request_id for request in self._all()]

    def view(self, row: int) -> RequestView:
        """Return one request, without making the views of the others where that is possible."""
        return self._all()[row]

    # ---- which requests, as masks

    @property
    def decoding(self) -> Mask:
        """Return which are past prefill and not migrating."""
        mask: Mask = ~(self.in_prefill | self.migrating)
        return mask

    def any_decoding(self) -> bool:
        """Return whether any is past prefill and not migrating."""
        return bool(self.decoding.any())

    @property
    def movable(self) -> Mask:
        """Return which can migrate; see the function `movable`."""
        mask: Mask = self.running & self.decoding
        return mask

    def where(self, mask: Mask) -> list[RequestView]:
        """Return the requests of a mask, in their order."""
        return [self.view(row) for row in np.flatnonzero(mask).tolist()]

    # ---- lengths

    @property
    def context_tokens(self) -> Ints:
        """Return the prompt and output tokens of each so far."""
        tokens: Ints = self.prompt_tokens + self.output_tokens
        return tokens

    @property
    def expected_remaining_tokens(self) -> Floats:
        """Return the predicted remaining tokens of each; without a prediction the maximum, infinite if
        unbounded."""
        limits = self.max_tokens
        left = np.where(limits > 0, np.maximum(limits - self.output_tokens, 0), np.inf)
        predicted = self.predicted_remaining_tokens
        expected: Floats = np.where(np.isnan(predicted), left, predicted)
        return expected

    # ---- what placements ask about each instance that has changed: never made from columns

    def prompts(self) -> Sequence[Prompt]:
        """Return the prompts of the requests in prefill, in any order."""
        prefill = Phase.PREFILL
        return [(r.arrival_s, r.prompt_tokens) for r in self._all() if r.phase is prefill]

    def reasoning(self) -> Reasoning:
        """Return the sums of the reasoning requests past prefill that are not demoted."""
        return reasoning_of(self._all())

    def phase_load(self, quantum_tokens: int = QUANTUM_TOKENS, without: str = "") -> PhaseLoad:
        """Count the requests for PASCAL's Algorithms 1 and 2 (section IV-B), except the one whose id is
        `without`. See `share_of`."""
        if without:
            return self._count(quantum_tokens, without)
        counted = self._counted
        if counted is None or counted.quantum_tokens != quantum_tokens:
            counted = self._counted = self._count(quantum_tokens, "")
        return counted

    def _count(self, quantum_tokens: int, without: str) -> PhaseLoad:
        """Count as `phase_load` does."""
        reasoning = fresh = 0
        least_slack = math.inf
        for request in self._all():
            if without and request.request_id == without:
                continue
            share = phase_share(request, quantum_tokens)
            reasoning += share.reasoning
            fresh += share.fresh
            if share.slack_tokens < least_slack:
                least_slack = share.slack_tokens
        return PhaseLoad(reasoning, fresh, least_slack, quantum_tokens)

    # ---- a sequence of views

    def _all(self) -> tuple[RequestView, ...]:
        if self._views is None:
            self._views = self.make_views()
        return self._views

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestView]: ...
    def __getitem__(self, index: int | slice) -> RequestView | Sequence[RequestView]:
        return self._all()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def reasoning_of(requests: Iterable[RequestView]) -> Reasoning:
    """Return the sums of those of the requests that reason and are not demoted."""
    found = [(r.arrival_s, r.output_tokens) for r in requests if r.phase is Phase.REASONING and not r.demoted]
    return Reasoning(len(found), sum(arrival_s for arrival_s, _ in found), sum(n for _, n in found))


def table_of(requests: Sequence[RequestView]) -> RequestTable:
    """Return the requests of an instance's view as a table."""
    return requests if isinstance(requests, RequestTable) else RequestTable(tuple(requests))


def has_kv(state: RequestState, host_kv_tokens: int) -> bool:
    """Return whether a request in this state runs, or has its KV in host memory until it does again."""
    return state is RequestState.RUNNING or (state is RequestState.PREEMPTED and host_kv_tokens > 0)


def decodes(request: RequestView) -> bool:
    """Return whether a request is past prefill and not migrating."""
    return request.phase is not Phase.PREFILL and not request.migrating


def movable(request: RequestView) -> bool:
    """Return whether a request can migrate: not during prefill, nor while it waits in host memory."""
    return request.state is RequestState.RUNNING and decodes(request)


class PhaseShare(NamedTuple):
    """One request's share of its instance's counts."""

    reasoning: bool
    fresh: bool
    # Infinite: the request does not affect whether its instance meets the SLO.
    slack_tokens: float


def phase_share(request: RequestView, quantum_tokens: int) -> PhaseShare:
    """Return what a request counts as; see `share_of`."""
    return share_of(
        request.phase is Phase.ANSWERING,
        request.demoted,
        request.pacer_slack_tokens,
        request.phase_tokens,
        request.state in OFF_DEVICE,
        quantum_tokens,
    )


def share_of(
    answering: bool,
    demoted: bool,
    slack_tokens: float | None,
    phase_tokens: int,
    off_device: bool,
    quantum_tokens: int,
) -> PhaseShare:
    """Return what a request with these properties counts as. `slack_tokens`: None before the answer begins.

    Prefill counts as reasoning (footnote 2). A demoted request is in neither count: it has left the
    high-priority queue, and is not fresh in the low-priority one. An answering request that waits for its
    first token off the device has an empty pacer that stays empty: its slack is minus infinity.
    """
    if not answering:
        return _DEMOTED if demoted else _REASONING
    if slack_tokens is None:
        slack_tokens = -math.inf if off_device and not phase_tokens else math.inf
    return PhaseShare(False, phase_tokens < quantum_tokens, slack_tokens)


_REASONING: Final = PhaseShare(True, False, math.inf)
_DEMOTED: Final = PhaseShare(False, False, math.inf)
