"""The requests of an instance as last reported and changed since, converted and counted only on access.

A large fleet reports many more requests than policies read: most placements need counts by phase alone. So a
report's columns are kept as they are, and a view of a request is made when somebody reads it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from operator import add
from typing import Final

import numpy as np

from tailrace.cluster import Phase, PhaseLoad, RequestView
from tailrace.control.cluster_model import CountedRequest
from tailrace.control.lazy_requests import LazyRequests
from tailrace.messages import PHASES, REQUEST_STATES, request_view
from tailrace.perf.remaining import limited, tokens_left
from tailrace.policy.columns import (
    ExpectedLengths,
    ListsExpectedLengths,
    ListsMovable,
    MovableRequests,
    expected_length_columns,
    movable,
    movable_columns,
)
from tailrace.policy.decoding import DecodingRequests, Lengths, ListsDecoding, decodes, decoding_columns
from tailrace.policy.phase_load import (
    OFF_DEVICE,
    PhaseShare,
    Prompt,
    phase_share,
    share_of,
)
from tailrace.request_columns import (
    ABSENT,
    full,
    optional_of,
    picked,
    traceparents_of,
    value_of,
)
from tailrace.v1 import monitor_pb2, types_pb2

_REASONING: Final = types_pb2.PHASE_REASONING
_ANSWERING: Final = types_pb2.PHASE_ANSWERING
_RUNNING: Final = types_pb2.REQUEST_STATE_RUNNING
_PAUSED: Final = types_pb2.REQUEST_STATE_PAUSED
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
        "_ids",
        "_index",
        "_instance_id",
        "_max_model_len",
        "_phases",
        "_prompts",
        "_reasoning",
        "_traceparents",
        "_views",
    )
    _ids: list[str]
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
        if before is not None and before._ids == ids:
            # Equal but not the same strings: the new ones are not kept.
            ids, index = before._ids, before._index
        else:
            index = dict(zip(ids, range(len(ids)), strict=True))
            if len(index) != len(ids):
                columns = _without_repeated(columns)
                ids = list(index)
                index = dict(zip(ids, range(len(ids)), strict=True))
        self._ids = ids
        self._index = index
        self._columns = columns
        self._phases = full(columns.phases, len(ids), _UNSPECIFIED)
        self._epochs = full(columns.epochs, len(ids), 0)
        # Views made so far, the counts by one quantum, and others; made on first use.
        self._views: dict[str, RequestView] = {}
        self._counted: PhaseLoad | None = None
        self._reasoning: int | None = None
        self._prompts: dict[str, Prompt] | None = None
        self._traceparents: dict[str, str] | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._index

    def left_since(self, before: ReportedRows) -> set[str]:
        """Return the requests that an earlier report of the instance has and this one has not."""
        return set() if self._ids is before._ids else before._index.keys() - self._index.keys()

    def changed_since(self, before: ReportedRows, others: Collection[str]) -> list[tuple[str, int, Phase]]:
        """Return id, epoch and phase of requests that an earlier report of the instance does not have, or
        with another epoch or phase, and of `others` as far as they are here; in the report's order."""
        index, phases, epochs = self._index, self._phases, self._epochs
        rows = {row for name in others if (row := index.get(name)) is not None}
        if self._ids is not before._ids:
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
        return [(self._ids[row], epochs[row], PHASES.get(phases[row], Phase.PREFILL)) for row in sorted(rows)]

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

    def prompt_tokens(self, request_id: str) -> int:
        """Return the length of the prompt of a request that is in the report."""
        return value_of(self._columns.prompt_tokens, self._index[request_id], 0)

    def arrivals(self) -> Iterator[tuple[str, float]]:
        """Yield the id of each request and the time of day when it arrived, without making views."""
        return zip(self._ids, full(self._columns.arrival_s, len(self._ids), 0.0), strict=True)

    def counted(self, request_id: str) -> CountedRequest:
        """Return how the instance's counts include a request that is in the report."""
        row, columns = self._index[request_id], self._columns
        return CountedRequest(
            value_of(columns.prompt_tokens, row, 0) + value_of(columns.output_tokens, row, 0),
            value_of(columns.kv_blocks, row, 0) * self._block_tokens,
            value_of(columns.states, row, types_pb2.REQUEST_STATE_UNSPECIFIED) in _SEATED,
        )

    def from_context(self, tokens: int) -> list[str]:
        """Return the requests with a context of at least so many tokens, in the report's order."""
        columns, count = self._columns, len(self._ids)
        prompts, outputs = full(columns.prompt_tokens, count, 0), full(columns.output_tokens, count, 0)
        rows = zip(self._ids, prompts, outputs, strict=True)
        return [name for name, prompt, output in rows if prompt + output >= tokens]

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

    @property
    def reasoning(self) -> int:
        """Return how many requests count as reasoning, as `phase_load` counts them."""
        if self._reasoning is None:
            demoted, phases = self._columns.demoted[:], self._phases
            self._reasoning = len(phases) - phases.count(_ANSWERING)
            if demoted:
                pairs = zip(full(demoted, len(phases), False), phases, strict=True)
                self._reasoning -= sum(low and phase != _ANSWERING for low, phase in pairs)
        return self._reasoning

    def reasons(self, request_id: str) -> bool:
        """Return whether a request that is in the report counts as reasoning."""
        row = self._index[request_id]
        return self._phases[row] != _ANSWERING and not value_of(self._columns.demoted, row, False)

    def _count(self, quantum_tokens: int) -> PhaseLoad:
        """Count column by column: without a call, and if possible without a step, for each request."""
        columns, phases = self._columns, self._phases
        count, answering = len(phases), phases.count(_ANSWERING)
        if not answering:
            return PhaseLoad(self.reasoning, 0, math.inf, quantum_tokens)
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
        return PhaseLoad(self.reasoning, fresh, least, quantum_tokens)

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
                        self._ids, phases, arrivals, lengths, strict=True
                    )
                    if phase != _REASONING and phase != _ANSWERING
                }
        return self._prompts

    def movable(self, without: Collection[str]) -> MovableRequests:
        """Return those that may migrate, except those of `without`."""
        columns, count = self._columns, len(self._ids)
        states = full(columns.states, count, types_pb2.REQUEST_STATE_UNSPECIFIED)
        rows = [
            row
            for row, (name, phase, state) in enumerate(zip(self._ids, self._phases, states, strict=True))
            if phase in (_REASONING, _ANSWERING) and state == _RUNNING and name not in without
        ]
        prompts = full(columns.prompt_tokens, count, 0)
        outputs = full(columns.output_tokens, count, 0)
        most = full(columns.max_tokens, count, 0)
        predicted = full(columns.predicted_remaining_tokens, count, ABSENT)
        lefts = (tokens_left(prompts[row], outputs[row], most[row], self._max_model_len) for row in rows)
        return MovableRequests(
            [self._ids[row] for row in rows],
            np.array([prompts[row] + outputs[row] for row in rows], dtype=np.float64),
            np.array([outputs[row] for row in rows], dtype=np.float64),
            np.array(
                [
                    predicted[row] if predicted[row] != predicted[row] else limited(predicted[row], left)
                    for row, left in zip(rows, lefts, strict=True)
                ],
                dtype=np.float64,
            ),
            np.array([self._epochs[row] for row in rows], dtype=np.float64),
        )

    def decoding(self, without: Collection[str]) -> DecodingRequests:
        """Return those that are past prefill and not migrating, except those of `without`."""
        contexts, arrivals = self._contexts(), full(self._columns.arrival_s, len(self._ids), 0.0)
        paused = self._paused()
        if not without and not paused and not self.in_prefill():
            return DecodingRequests(self._ids, contexts, arrivals)
        rows = [
            row
            for row, (name, phase) in enumerate(zip(self._ids, self._phases, strict=True))
            if phase in (_REASONING, _ANSWERING) and name not in without and row not in paused
        ]
        return DecodingRequests(
            [self._ids[row] for row in rows], [contexts[row] for row in rows], [arrivals[row] for row in rows]
        )

    def any_decoding(self, without: Collection[str]) -> bool:
        """Return whether any is past prefill and not migrating, except those of `without`."""
        paused = self._paused()
        return any(
            phase in (_REASONING, _ANSWERING) and name not in without and row not in paused
            for row, (name, phase) in enumerate(zip(self._ids, self._phases, strict=True))
        )

    def migrating_tokens(self, without: Collection[str]) -> int:
        """Return the context of those that are migrating away, except those of `without`."""
        paused = self._paused()
        if not paused:
            return 0
        contexts = self._contexts()
        return sum(contexts[row] for row in paused if self._ids[row] not in without)

    def _paused(self) -> list[int]:
        """Return the rows of those that their instance has paused for a migration."""
        states = self._columns.states[:]
        if _PAUSED not in states:
            return []
        return [row for row, state in enumerate(states[: len(self._ids)]) if state == _PAUSED]

    def in_prefill(self) -> Collection[str]:
        """Return those in prefill, in the report's order."""
        return self.prompts().keys()

    def lengths(self, without: Collection[str]) -> tuple[list[int], list[int]]:
        """Return prompt tokens, and tokens of context, of all but those of `without`."""
        prompts, contexts = full(self._columns.prompt_tokens, len(self._ids), 0), self._contexts()
        gone = sorted((row for name in without if (row := self._index.get(name)) is not None), reverse=True)
        for row in gone:
            del prompts[row], contexts[row]
        return prompts, contexts

    def expected_lengths(self, without: Collection[str]) -> ExpectedLengths:
        """Return tokens so far and expected remaining tokens of all but those of `without`."""
        columns, count = self._columns, len(self._ids)
        contexts = np.array(self._contexts(), dtype=np.float64)
        outputs = np.array(full(columns.output_tokens, count, 0), dtype=np.float64)
        most = np.array(full(columns.max_tokens, count, 0), dtype=np.float64)
        predicted = np.array(full(columns.predicted_remaining_tokens, count, ABSENT), dtype=np.float64)
        # As `tokens_left` and `limited`: only predictions are capped by the length of the model.
        left = np.maximum(np.where(most > 0.0, most - outputs, np.inf), 0.0)
        capped = left
        if self._max_model_len > 0:
            capped = np.minimum(left, np.maximum(self._max_model_len - contexts, 0.0))
        remaining = np.where(np.isnan(predicted), left, np.maximum(np.minimum(predicted, capped), 0.0))
        gone = [row for name in without if (row := self._index.get(name)) is not None]
        if gone:
            contexts, remaining = np.delete(contexts, gone), np.delete(remaining, gone)
        return ExpectedLengths(contexts, remaining)

    def _contexts(self) -> list[int]:
        columns, count = self._columns, len(self._ids)
        return list(map(add, full(columns.prompt_tokens, count, 0), full(columns.output_tokens, count, 0)))


def _without_repeated(columns: monitor_pb2.RequestColumns) -> monitor_pb2.RequestColumns:
    """Return each request once, as last named, where it was first named."""
    return picked(columns, list({name: row for row, name in enumerate(columns.request_ids)}.values()))


class ReportedRequests(ListsMovable, ListsExpectedLengths, ListsDecoding, LazyRequests):
    """The requests of an instance at one moment, pending placements last. Immutable."""

    __slots__ = ("_changed", "_pending", "_prompts", "_rows")

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
        self._prompts: list[Prompt] | None = None

    def prompts(self) -> list[Prompt]:
        """Return the prompts of requests in prefill."""
        if self._prompts is None:
            reported = self._rows.prompts().items()
            added = (r for r in self._added() if r.phase is Phase.PREFILL)
            self._prompts = [prompt for name, prompt in reported if name not in self._changed]
            self._prompts += [(r.arrival_s, r.prompt_tokens) for r in added]
        return self._prompts

    def reasoning(self) -> int:
        """Return how many requests count as reasoning."""
        rows = self._rows
        gone = sum(rows.reasons(name) for name in self._changed if name in rows)
        added = sum(r.phase is not Phase.ANSWERING and not r.demoted for r in self._added())
        return rows.reasoning - gone + added

    def movable(self) -> MovableRequests:
        """Return the requests that may migrate: those as reported first."""
        reported = self._rows.movable(self._changed)
        added = list(filter(movable, self._added()))
        if not added:
            return reported
        both = zip(reported[1:], movable_columns(added)[1:], strict=True)
        names = [*reported.request_ids, *(request.request_id for request in added)]
        return MovableRequests(names, *(np.concatenate(columns) for columns in both))

    def decoding(self) -> DecodingRequests:
        """Return the requests that are past prefill and not migrating: those as reported first."""
        reported = self._rows.decoding(self._changed)
        if not self._changed and not self._pending:
            return reported
        added = decoding_columns(self._added())
        return DecodingRequests(
            [*reported.request_ids, *added.request_ids],
            [*reported.context_tokens, *added.context_tokens],
            [*reported.arrival_s, *added.arrival_s],
        )

    def any_decoding(self) -> bool:
        """Return whether any request is past prefill and not migrating."""
        return self._rows.any_decoding(self._changed) or any(map(decodes, self._added()))

    def migrating_tokens(self) -> int:
        """Return the context of the requests that are migrating away, in tokens."""
        added = sum(request.context_tokens for request in self._added() if request.migrating)
        return self._rows.migrating_tokens(self._changed) + added

    def lengths(self) -> Lengths:
        """Return the lengths of all requests: those as reported first."""
        prompts, contexts = self._rows.lengths(self._changed)
        for request in self._added():
            prompts.append(request.prompt_tokens)
            contexts.append(request.context_tokens)
        return prompts, contexts

    def expected_lengths(self) -> ExpectedLengths:
        """Return the lengths of all requests: those as reported first."""
        reported = self._rows.expected_lengths(self._changed)
        if not self._changed and not self._pending:
            return reported
        added = expected_length_columns(self._added())
        return ExpectedLengths(*(np.concatenate(both) for both in zip(reported, added, strict=True)))

    def in_prefill(self) -> list[RequestView]:
        """Return the requests in prefill, in order."""
        return [r for r in self._in_order(self._rows.in_prefill()) if r.phase is Phase.PREFILL]

    def from_context(self, tokens: int) -> list[RequestView]:
        """Return the requests with a context of at least so many tokens, in order, without making views of
        the others."""
        rows = self._in_order(self._rows.from_context(tokens))
        return [request for request in rows if request.context_tokens >= tokens]

    def _in_order(self, reported: Iterable[str]) -> list[RequestView]:
        """Return these of the report's requests, and all that are not as in the report, in order."""
        rows, changed = self._rows, self._changed
        names = rows.in_order({*reported, *changed})
        held = [changed[name] if name in changed else rows.view(name) for name in names]
        held += [request for name, request in changed.items() if name not in rows]
        held += self._pending
        return [request for request in held if request is not None]

    def find(self, request_id: str) -> RequestView:
        """Return the view of one of the requests. Raise KeyError if it is not among them."""
        if request_id not in self._changed and request_id in self._rows:
            return self._rows.view(request_id)
        for request in self._added():
            if request.request_id == request_id:
                return request
        raise KeyError(request_id)

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
        for request in self._added():
            if not without or request.request_id != without:
                share = phase_share(request, quantum_tokens)
                reasoning += share.reasoning
                fresh += share.fresh
                least = min(least, share.slack_tokens)
        return PhaseLoad(reasoning, fresh, least, quantum_tokens)

    def _added(self) -> Iterator[RequestView]:
        """Yield the requests that are not as in the report."""
        for request in self._changed.values():
            if request is not None:
                yield request
        yield from self._pending

    def _build(self) -> tuple[RequestView, ...]:
        rows, changed = self._rows, self._changed
        held = [changed[name] if name in changed else rows.view(name) for name in rows]
        held += [request for name, request in changed.items() if name not in rows]
        return (*(request for request in held if request is not None), *self._pending)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    __hash__ = None  # type: ignore[assignment]
