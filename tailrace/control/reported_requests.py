"""The requests of an instance as last reported and changed since, converted and counted only on access.

A large fleet reports many more requests than policies read: most placements need counts by phase alone. So a
report's messages are kept as they are, and a view of a request is made when somebody reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from tailrace.cluster import Phase, PhaseLoad, RequestView
from tailrace.control.lazy_requests import LazyRequests
from tailrace.messages import PHASES, REQUEST_STATES, request_view
from tailrace.policy.phase_load import (
    OFF_DEVICE,
    PhaseShare,
    Prompt,
    phase_share,
    share_of,
)
from tailrace.v1 import monitor_pb2, types_pb2

_ANSWERING: Final = types_pb2.PHASE_ANSWERING
# Any other state counts as waiting (tailrace.messages), also one that this version does not know.
_ON_DEVICE: Final = frozenset(number for number, state in REQUEST_STATES.items() if state not in OFF_DEVICE)


class ReportedRows:
    """The requests of one steady report, in its order. Immutable."""

    __slots__ = ("_block_tokens", "_counted", "_instance_id", "_max_model_len", "_prompts", "_rows", "_views")

    def __init__(
        self,
        instance_id: str,
        block_tokens: int,
        max_model_len: int,
        rows: Mapping[str, monitor_pb2.RequestReport],
    ) -> None:
        self._instance_id = instance_id
        self._block_tokens = block_tokens
        self._max_model_len = max_model_len
        self._rows = rows
        # Views made so far, the counts by one quantum, and the prompts; made on first use.
        self._views: dict[str, RequestView] = {}
        self._counted: PhaseLoad | None = None
        self._prompts: dict[str, Prompt] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._rows

    def messages(self) -> Mapping[str, monitor_pb2.RequestReport]:
        """Return the reported requests by id, not to be changed."""
        return self._rows

    def view(self, request_id: str) -> RequestView:
        """Return the view of a request that is in the report, without migrations open to the scheduler."""
        view = self._views.get(request_id)
        if view is None:
            view = self._views[request_id] = request_view(
                self._instance_id, self._block_tokens, self._max_model_len, self._rows[request_id], False
            )
        return view

    def traceparent(self, request_id: str) -> str:
        """Return the reported trace context; "" if there is none."""
        row = self._rows.get(request_id)
        return "" if row is None else row.traceparent

    def share(self, request_id: str, quantum_tokens: int) -> PhaseShare:
        """Return what a request that is in the report counts as; see `phase_share`."""
        return _share(self._rows[request_id], quantum_tokens)

    def phase_load(self, quantum_tokens: int) -> PhaseLoad:
        """Count all requests of the report, as the function `phase_load` does."""
        counted = self._counted
        if counted is None or counted.quantum_tokens != quantum_tokens:
            counted = self._counted = _count(self._rows.values(), quantum_tokens)
        return counted

    def prompts(self) -> Mapping[str, Prompt]:
        """Return arrival and length of each request in prefill."""
        if self._prompts is None:
            self._prompts = {
                request_id: (row.arrival_s, row.prompt_tokens)
                for request_id, row in self._rows.items()
                if PHASES.get(row.phase, Phase.PREFILL) is Phase.PREFILL
            }
        return self._prompts

    def detached(self) -> ReportedRows:
        """Return a copy whose messages share no memory with others of the same delivery.

        Protobuf frees the memory of a message and of all its parts at once: the last report of one instance
        would keep the reports of all instances that were delivered with it.
        """
        copies = {name: monitor_pb2.RequestReport() for name in self._rows}
        for name, copy in copies.items():
            copy.CopyFrom(self._rows[name])
        return ReportedRows(self._instance_id, self._block_tokens, self._max_model_len, copies)


def _share(row: monitor_pb2.RequestReport, quantum_tokens: int) -> PhaseShare:
    answering = row.phase == _ANSWERING
    if not answering:
        return share_of(False, row.demoted, None, 0, False, quantum_tokens)
    return share_of(
        True,
        row.demoted,
        row.pacer_slack_tokens if row.HasField("pacer_slack_tokens") else None,
        row.phase_tokens,
        row.state not in _ON_DEVICE,
        quantum_tokens,
    )


def _count(rows: Iterable[monitor_pb2.RequestReport], quantum_tokens: int) -> PhaseLoad:
    reasoning = fresh = 0
    least = math.inf
    for row in rows:
        if row.phase != _ANSWERING:
            # As `share_of` counts it, without a call for each of a large fleet's requests.
            reasoning += not row.demoted
            continue
        share = _share(row, quantum_tokens)
        fresh += share.fresh
        if share.slack_tokens < least:
            least = share.slack_tokens
    return PhaseLoad(reasoning, fresh, least, quantum_tokens)


class ReportedRequests(LazyRequests):
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
