"""The requests of an instance as last reported and changed since, converted and counted only on access.

A large fleet reports many more requests than policies read: most placements need counts by phase alone. So a
report's columns are kept as they are, and a view of a request is made when somebody reads it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import compress
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import Phase, PhaseLoad, RequestView
from tailrace.control.cluster_model import CountedRequest
from tailrace.messages import PHASES, REQUEST_STATES, request_view
from tailrace.perf.steps import Floats
from tailrace.policy.requests import (
    OFF_DEVICE,
    Column,
    Ints,
    PhaseShare,
    Prompt,
    Reasoning,
    RequestTable,
    decodes,
    phase_share,
    read_only,
    reasoning_of,
    share_of,
)
from tailrace.request_columns import ABSENT, full, optional_of, picked, traceparents_of, value_of
from tailrace.v1 import monitor_pb2, types_pb2

T = TypeVar("T", bound=np.generic)

_REASONING: Final = types_pb2.PHASE_REASONING
_ANSWERING: Final = types_pb2.PHASE_ANSWERING
_RUNNING: Final = types_pb2.REQUEST_STATE_RUNNING
_PAUSED: Final = types_pb2.REQUEST_STATE_PAUSED
_PREEMPTED: Final = types_pb2.REQUEST_STATE_PREEMPTED
_UNSPECIFIED: Final = types_pb2.PHASE_UNSPECIFIED
# Any other state counts as waiting (tailrace.messages), also one that this version does not know.
_ON_DEVICE: Final = frozenset(number for number, state in REQUEST_STATES.items() if state not in OFF_DEVICE)
# In the batch, as counted.
_SEATED: Final = (types_pb2.REQUEST_STATE_RUNNING, types_pb2.REQUEST_STATE_PAUSED)


class ReportedRows:
    """The requests of one steady report, in its order. Immutable."""

    __slots__ = (
        "_block_tokens",
        "_columns",
        "_counted",
        "_epochs",
        "_index",
        "_instance_id",
        "_made",
        "_max_model_len",
        "_phases",
        "_prompts",
        "_reasoning",
        "_traceparents",
        "_views",
        "ids",
    )
    ids: list[str]
    _index: dict[str, int]

    def __init__(
        self,
        instance_id: str,
        block_tokens: int,
        max_model_len: int,
        columns: monitor_pb2.RequestColumns,
        before: ReportedRows | None = None,
    ) -> None:
        """`columns` must not be changed later. `before`: the instance's previous report, with which this one
        shares what is equal."""
        self._instance_id = instance_id
        self._block_tokens = block_tokens
        self._max_model_len = max_model_len
        ids = columns.request_ids[:]
        if before is not None and before.ids == ids:
            # Equal but not the same strings: the new ones are not kept.
            ids, index = before.ids, before._index
        else:
            index = dict(zip(ids, range(len(ids)), strict=True))
            if len(index) != len(ids):
                columns = _without_repeated(columns)
                ids = list(index)
                index = dict(zip(ids, range(len(ids)), strict=True))
        self.ids = ids
        self._index = index
        self._columns = columns
        self._phases = full(columns.phases, len(ids), _UNSPECIFIED)
        self._epochs = full(columns.epochs, len(ids), 0)
        # Views and columns made so far, the counts by one quantum, and others; made on first use.
        self._views: dict[str, RequestView] = {}
        self._made: dict[str, NDArray[Any]] = {}
        self._counted: PhaseLoad | None = None
        self._reasoning: Reasoning | None = None
        self._prompts: dict[str, Prompt] | None = None
        self._traceparents: dict[str, str] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._index

    def left_since(self, before: ReportedRows) -> set[str]:
        """Return the requests that an earlier report of the instance has and this one has not."""
        return set() if self.ids is before.ids else before._index.keys() - self._index.keys()

    def changed_since(self, before: ReportedRows, others: Collection[str]) -> list[tuple[str, int, Phase]]:
        """Return id, epoch and phase of requests that an earlier report of the instance does not have, or
        with another epoch or phase, and of `others` as far as they are here; in the report's order."""
        index, phases, epochs = self._index, self._phases, self._epochs
        rows = {row for name in others if (row := index.get(name)) is not None}
        if self.ids is not before.ids:
            old_row, old_phases, old_epochs = before._index.get, before._phases, before._epochs
            for name, row in index.items():
                old = old_row(name)
                if old is None or phases[row] != old_phases[old] or epochs[row] != old_epochs[old]:
                    rows.add(row)
        elif phases != before._phases or epochs != before._epochs:
            pairs = zip(phases, before._phases, epochs, before._epochs, strict=True)
            rows.update(
                row
                for row, (phase, old_phase, epoch, old_epoch) in enumerate(pairs)
                if phase != old_phase or epoch != old_epoch
            )
        return [(self.ids[row], epochs[row], PHASES.get(phases[row], Phase.PREFILL)) for row in sorted(rows)]

    def in_order(self, request_ids: Set[str]) -> list[str]:
        """Return those of the requests that are in the report, in its order."""
        index = self._index
        return sorted(index.keys() & request_ids, key=index.__getitem__)

    def view(self, request_id: str) -> RequestView:
        """Return the view of a request that is in the report, without migrations open to the scheduler."""
        view = self._views.get(request_id)
        if view is None:
            view = self._views[request_id] = request_view(
                self._instance_id,
                self._block_tokens,
                self._max_model_len,
                self._columns,
                self._index[request_id],
            )
        return view

    def row(self, request_id: str) -> int:
        """Return the row of a request that is in the report."""
        return self._index[request_id]

    def prompt_tokens(self, request_id: str) -> int:
        """Return the length of the prompt of a request that is in the report."""
        return value_of(self._columns.prompt_tokens, self._index[request_id], 0)

    def arrivals(self) -> Iterator[tuple[str, float]]:
        """Yield the id of each request and the time of day when it arrived, without making views."""
        return zip(self.ids, full(self._columns.arrival_s, len(self.ids), 0.0), strict=True)

    def counted(self, request_id: str) -> CountedRequest:
        """Return how the instance's counts include a request that is in the report."""
        row, columns = self._index[request_id], self._columns
        return CountedRequest(
            value_of(columns.prompt_tokens, row, 0) + value_of(columns.output_tokens, row, 0),
            value_of(columns.kv_blocks, row, 0) * self._block_tokens,
            value_of(columns.states, row, types_pb2.REQUEST_STATE_UNSPECIFIED) in _SEATED,
        )

    def traceparent(self, request_id: str) -> str:
        """Return the reported trace context; "" if there is none."""
        if self._traceparents is None:
            self._traceparents = traceparents_of(self._columns)
        return self._traceparents.get(request_id, "")

    def share(self, request_id: str, quantum_tokens: int) -> PhaseShare:
        """Return what a request that is in the report counts as; see `phase_share`."""
        row, columns = self._index[request_id], self._columns
        return share_of(
            self._phases[row] == _ANSWERING,
            value_of(columns.demoted, row, False),
            optional_of(columns.pacer_slack_tokens, row),
            value_of(columns.phase_tokens, row, 0),
            value_of(columns.states, row, types_pb2.REQUEST_STATE_UNSPECIFIED) not in _ON_DEVICE,
            quantum_tokens,
        )

    def phase_load(self, quantum_tokens: int) -> PhaseLoad:
        """Count all requests of the report, as the function `phase_load` does."""
        counted = self._counted
        if counted is None or counted.quantum_tokens != quantum_tokens:
            counted = self._counted = self._count(quantum_tokens)
        return counted

    def reasoning(self, without: Iterable[str]) -> Reasoning:
        """Return the sums of the reasoning requests that are not demoted, but for those of `without`."""
        sums = self._reasoning
        if sums is None:
            sums = self._reasoning = self._sum_reasoning()
        if not sums.requests:
            return sums
        columns, row_of = self._columns, self._index.get
        count, arrivals_s, tokens = sums
        for row in map(row_of, without):
            if row is None or self._phases[row] != _REASONING or value_of(columns.demoted, row, False):
                continue
            count -= 1
            arrivals_s -= value_of(columns.arrival_s, row, 0.0)
            tokens -= value_of(columns.output_tokens, row, 0)
        return Reasoning(count, arrivals_s, tokens)

    def _sum_reasoning(self) -> Reasoning:
        phases, columns = self._phases, self._columns
        rows = len(phases)
        count = phases.count(_REASONING)
        if not count:
            return Reasoning(0, 0.0, 0)
        arrivals_s, tokens = full(columns.arrival_s, rows, 0.0), full(columns.output_tokens, rows, 0)
        if count < rows or columns.demoted:
            demoted = full(columns.demoted, rows, False)
            reasons = [p == _REASONING and not low for p, low in zip(phases, demoted, strict=True)]
            count = sum(reasons)
            arrivals_s, tokens = list(compress(arrivals_s, reasons)), list(compress(tokens, reasons))
        return Reasoning(count, sum(arrivals_s), sum(tokens))

    def _count(self, quantum_tokens: int) -> PhaseLoad:
        """Count column by column: without a call, and if possible without a step, for each request."""
        columns, phases = self._columns, self._phases
        count, answering = len(phases), phases.count(_ANSWERING)
        reasoning = count - answering
        if demoted := columns.demoted[:]:
            pairs = zip(full(demoted, count, False), phases, strict=True)
            reasoning -= sum(low and phase != _ANSWERING for low, phase in pairs)
        if not answering:
            return PhaseLoad(reasoning, 0, math.inf, quantum_tokens)
        tokens = full(columns.phase_tokens, count, 0)
        output_tokens = [n for n, phase in zip(tokens, phases, strict=True) if phase == _ANSWERING]
        fresh = sum(map(quantum_tokens.__gt__, output_tokens))
        slacks = full(columns.pacer_slack_tokens, count, ABSENT)
        known = [s for s, phase in zip(slacks, phases, strict=True) if phase == _ANSWERING and s == s]
        least = min(known, default=math.inf)
        states = full(columns.states, count, types_pb2.REQUEST_STATE_UNSPECIFIED)
        if sum(map(states.count, _ON_DEVICE)) < count:
            rows = zip(phases, states, slacks, tokens, strict=True)
            if any(
                phase == _ANSWERING and state not in _ON_DEVICE and slack != slack and not output_tokens
                for phase, state, slack, output_tokens in rows
            ):
                # One waits off the device for its first token of the answer; see `share_of`.
                least = -math.inf
        return PhaseLoad(reasoning, fresh, least, quantum_tokens)

    def any_decoding(self, without: Collection[str]) -> bool:
        """Return whether any of the requests is past prefill and not paused, except those in `without`."""
        # In most reports the first one is, so no column is copied.
        states = self._columns.states
        return any(
            phase in (_REASONING, _ANSWERING)
            and name not in without
            and value_of(states, row, types_pb2.REQUEST_STATE_UNSPECIFIED) != _PAUSED
            for row, (name, phase) in enumerate(zip(self.ids, self._phases, strict=True))
        )

    def prompts(self) -> Mapping[str, Prompt]:
        """Return arrival and length of each request in prefill."""
        if self._prompts is None:
            columns, phases = self._columns, self._phases
            self._prompts = {}
            if phases.count(_REASONING) + phases.count(_ANSWERING) < len(phases):
                arrivals = full(columns.arrival_s, len(phases), 0.0)
                lengths = full(columns.prompt_tokens, len(phases), 0)
                self._prompts = {
                    name: (arrival_s, length)
                    for name, phase, arrival_s, length in zip(
                        self.ids, phases, arrivals, lengths, strict=True
                    )
                    if phase != _REASONING and phase != _ANSWERING
                }
        return self._prompts

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of a table of these requests, by its name in RequestTable."""
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = read_only(self._make_column(name))
        return made

    def _make_column(self, name: str) -> NDArray[Any]:
        """Convert a column of the report, so that it holds what the views of its requests do."""
        made: NDArray[Any]
        match name:
            case "in_prefill":
                made = np.zeros(len(self), dtype=np.bool_)
                if self.prompts():
                    made[[self._index[request_id] for request_id in self.prompts()]] = True
            case "running":
                made = self._numbers(self._columns.states) == _RUNNING
            case "migrating":
                # Paused by their instance for a migration.
                made = self._numbers(self._columns.states) == _PAUSED
            case "with_kv":
                states = self._numbers(self._columns.states)
                in_host = self._numbers(self._columns.host_kv_blocks) * self._block_tokens > 0
                made = (states == _RUNNING) | ((states == _PREEMPTED) & in_host)
            case "epochs":
                made = self._numbers(self._epochs)
            case "arrival_s":
                made = np.array(full(self._columns.arrival_s, len(self), 0.0), dtype=np.float64)
            case "predicted_remaining_tokens":
                made = self._predicted()
            case _:
                made = self._numbers(getattr(self._columns, name))
        return made

    def _numbers(self, column: Sequence[int]) -> Ints:
        return np.array(full(column, len(self), 0), dtype=np.int64)

    def _predicted(self) -> Floats:
        """Return the predicted remaining tokens, capped by what may still come; NaN: no prediction."""
        given = full(self._columns.predicted_remaining_tokens, len(self), ABSENT)
        predicted = np.array(given, dtype=np.float64)
        prompts, outputs = self.column("prompt_tokens"), self.column("output_tokens")
        limits = self.column("max_tokens")
        # As `tokens_left` and `limited`.
        left = np.where(limits > 0, limits - outputs, np.inf)
        if self._max_model_len > 0:
            left = np.minimum(left, self._max_model_len - prompts - outputs)
        capped: Floats = np.maximum(np.minimum(predicted, np.maximum(left, 0.0)), 0.0)
        return capped


def _without_repeated(columns: monitor_pb2.RequestColumns) -> monitor_pb2.RequestColumns:
    """Return each request once, as last named, where it was first named."""
    return picked(columns, list({name: row for row, name in enumerate(columns.request_ids)}.values()))


class _Parts(NamedTuple):
    """How the requests of an instance differ from its report."""

    # Those of the report that are still here.
    reported: list[str]
    # Rows of the report whose requests have left.
    gone: list[int]
    # Requests of the report that have changed since.
    replaced: list[RequestView]
    # Requests that the report does not have.
    added: list[RequestView]


class ReportedRequests(RequestTable):
    """The requests of an instance at one moment: in the report's order, as changed since; then those added
    since, then pending placements."""

    __slots__ = ("_changed", "_corrected", "_parts", "_pending", "_prompts", "_rows")

    def __init__(
        self,
        rows: ReportedRows,
        changed: Mapping[str, RequestView | None],
        pending: Sequence[RequestView],
    ) -> None:
        """`changed`: requests changed or added since the report; None: gone. Must not be changed later."""
        super().__init__()
        self._rows = rows
        self._changed = changed
        self._pending = pending
        # Made on first use.
        self._parts: _Parts | None = None
        self._corrected: list[RequestView] | None = None
        self._prompts: list[Prompt] | None = None

    # ---- a table of the report's rows, corrected

    def make_views(self) -> tuple[RequestView, ...]:
        """Make the views of all requests, once."""
        rows, changed, parts = self._rows, self._changed, self._arranged()
        return (*(changed.get(name) or rows.view(name) for name in parts.reported), *parts.added)

    def make_column(self, column: Column[T]) -> NDArray[T]:
        """Make a column from that of the report."""
        reported: NDArray[T] = self._rows.column(column.name)
        parts = self._arranged()
        if not self._changed and not parts.added:
            return reported
        made = reported.copy()
        if parts.replaced:
            made[[self._rows.row(r.request_id) for r in parts.replaced]] = column.of(parts.replaced)
        if parts.gone:
            made = np.delete(made, parts.gone)
        return np.concatenate((made, column.of(parts.added))) if parts.added else made

    @property
    def ids(self) -> Sequence[str]:
        """Return the ids of the requests, in their order."""
        parts = self._arranged()
        return [*parts.reported, *(r.request_id for r in parts.added)] if parts.added else parts.reported

    def view(self, row: int) -> RequestView:
        """Return one request."""
        parts = self._arranged()
        if row >= len(parts.reported):
            return parts.added[row - len(parts.reported)]
        name = parts.reported[row]
        return self._changed.get(name) or self._rows.view(name)

    def _arranged(self) -> _Parts:
        if self._parts is None:
            rows, changed = self._rows, self._changed
            held = [request for request in changed.values() if request is not None]
            replaced = [request for request in held if request.request_id in rows]
            added = [request for request in held if request.request_id not in rows]
            gone = [rows.row(name) for name, request in changed.items() if request is None and name in rows]
            reported = rows.ids
            if gone:
                reported = [name for name in reported if changed.get(name, name) is not None]
            self._parts = _Parts(reported, gone, replaced, [*added, *self._pending])
        return self._parts

    # ---- counts of the report, corrected by what has changed

    def any_decoding(self) -> bool:
        """Return whether any is past prefill and not migrating: in most tables the first one is."""
        return self._rows.any_decoding(self._changed) or any(map(decodes, self._corrections()))

    def prompts(self) -> list[Prompt]:
        """Return the prompts of requests in prefill."""
        if self._prompts is None:
            changed, prefill = self._changed, Phase.PREFILL
            reported = self._rows.prompts().items()
            self._prompts = [prompt for name, prompt in reported if name not in changed]
            self._prompts += [
                (r.arrival_s, r.prompt_tokens) for r in self._corrections() if r.phase is prefill
            ]
        return self._prompts

    def reasoning(self) -> Reasoning:
        """Return the sums of the requests that reason."""
        return self._rows.reasoning(self._changed).plus(reasoning_of(self._corrections()))

    def _count(self, quantum_tokens: int, without: str) -> PhaseLoad:
        """Correct the count of the report by what has changed."""
        rows, changed = self._rows, self._changed
        counted = rows.phase_load(quantum_tokens)
        reasoning, fresh = counted.reasoning, counted.fresh_answering
        least = counted.least_pacer_slack_tokens
        removed = [name for name in changed if name in rows]
        if without in rows and without not in changed:
            removed.append(without)
        least_is_known = True
        for name in removed:
            share = rows.share(name, quantum_tokens)
            reasoning -= share.reasoning
            fresh -= share.fresh
            least_is_known = least_is_known and (share.slack_tokens == math.inf or share.slack_tokens > least)
        if not least_is_known:
            gone = frozenset(removed)
            slacks = (rows.share(name, quantum_tokens).slack_tokens for name in rows if name not in gone)
            least = min(slacks, default=math.inf)
        for request in self._corrections():
            if not without or request.request_id != without:
                share = phase_share(request, quantum_tokens)
                reasoning += share.reasoning
                fresh += share.fresh
                least = min(least, share.slack_tokens)
        return PhaseLoad(reasoning, fresh, least, quantum_tokens)

    def _corrections(self) -> list[RequestView]:
        """Return the requests that are not as in the report."""
        if self._corrected is None:
            self._corrected = [request for request in self._changed.values() if request is not None]
            self._corrected += self._pending
        return self._corrected
