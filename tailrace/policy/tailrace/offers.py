"""What an arrival costs on each instance, in columns, one entry an instance.

What follows from an instance's report alone is worked out once for each report and kept: between two
placements only few of a thousand instances have reported. Nothing is decided by what is kept: it follows
from the views and the costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress
from math import inf
from operator import attrgetter, is_not
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.cluster import InstanceState, InstanceView
from tailrace.intra.due import due_s
from tailrace.policy.phase_load import phase_load
from tailrace.policy.prompts import prompts
from tailrace.policy.tailrace.costs import Costs, Longest
from tailrace.policy.tailrace.queue import Queue
from tailrace.policy.tailrace.steps import Floats, StepTimes


class _Reported(NamedTuple):
    """Read off views."""

    running: Floats
    waiting: Floats
    used: Floats
    backlog: Floats
    host: Floats
    capacity: Floats
    reasoning: Floats
    # The most that is predicted.
    future: Floats
    # Prompts that are known of, and their tokens.
    prompts: Floats
    prompt_tokens: Floats


class _Columns(NamedTuple):
    """What arrivals see, whatever their length."""

    # Of the instance's step times.
    per_token_s: Floats
    per_token_squared_s: Floats
    chunk_tokens: Floats
    # One decode step; what a second of decoding counts.
    step_s: Floats
    hurry: Floats
    # What decoding with the others costs, and as much again per prompt token: without a penalty, which makes
    # that no sum of the two.
    joining_s: Floats
    joining_s_per_token: Floats
    # Those that run or wait.
    requests: Floats
    # Prompts of which nothing but the sum is known.
    unknown: Floats
    unknown_s: Floats
    # KV: spoken for, now or as predicted; all that there is; used, but at least 1.
    spoken_for: Floats
    capacity: Floats
    used: Floats


_COEFFICIENTS: Final = attrgetter(
    "prefill_base_s",
    "per_token_s",
    "per_token_squared_s",
    "decode_base_s",
    "per_request_s",
    "per_kv_token_s",
    "chunk_tokens",
)
_WIDTH: Final = len(_Reported._fields) + 7


class Offers:
    """One policy's."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._instances: list[InstanceView] = []
        self._at: dict[str, int] = {}
        # [columns, instances]
        self._table: Floats = np.empty((len(_Columns._fields), 0))
        # Of those where prompts are known to wait.
        self._queues: dict[int, Queue] = {}
        # Longest contexts; only with a penalty.
        self._longest: list[int] = []
        self._not_active: set[int] = set()
        self._pooled: set[int] = set()

    @property
    def all_active(self) -> bool:
        """No instance is in any other state."""
        return not self._not_active

    @property
    def pooled(self) -> bool:
        """Whether any instance is in a pool."""
        return bool(self._pooled)

    def cheapest(self, among: Sequence[InstanceView] | None, prompt_tokens: int, now: float) -> InstanceView:
        """Where an arrival costs least; the first of equals. `among`: some of them, not none; None: all."""
        costs = self._costs
        positions: NDArray[np.intp] | None = None
        if among is not None:
            at = self._at
            positions = np.array([at[instance.instance_id] for instance in among], dtype=np.intp)
        columns = _Columns(*self._table)
        first = 0 if positions is None else int(positions[0])
        cost_s = self._without_kv_s(columns, first, prompt_tokens, now)
        over = columns.spoken_for + (prompt_tokens + costs.expected_tokens) - columns.capacity
        shortage_s = costs.freeing_s(np.maximum(over, 0.0), columns.step_s, columns.used)
        if costs.penalty is None:
            cost_s += shortage_s
            found = cost_s.argmin() if positions is None else positions[cost_s[positions].argmin()]
            return self._instances[int(found)]
        if positions is None:
            positions = np.arange(len(self._instances))
        return self._cheapest_by_length(positions, cost_s, shortage_s, columns.hurry, prompt_tokens)

    # ---- an arrival

    def _without_kv_s(self, columns: _Columns, first: int, prompt_tokens: int, now: float) -> Floats:
        """Its wait, its prefill, and, without a penalty, decoding with the others."""
        costs = self._costs
        own_s = (columns.per_token_s + columns.per_token_squared_s * prompt_tokens) * prompt_tokens
        # A user's, so the same for all, however fast they are: by the first.
        patience_s = costs.patience_s + costs.patience_prefills * float(own_s[first])
        before, before_s = columns.unknown, columns.unknown_s
        after = np.zeros(len(own_s))
        if self._queues:
            before, before_s = before.copy(), before_s.copy()
            due = due_s(now, prompt_tokens)
            for position, queue in self._queues.items():
                tokens, seconds, later = queue.before(due)
                before[position] += tokens
                before_s[position] += seconds
                after[position] = later
        chunks = columns.chunk_tokens
        wait_s = own_s + (prompt_tokens / chunks + 1.0) * columns.step_s
        wait_s += before_s + before / chunks * columns.step_s
        others = np.maximum(0.0, columns.requests - after)
        cost_s = columns.joining_s + columns.joining_s_per_token * prompt_tokens
        cost_s += wait_s * (1.0 + wait_s / patience_s) + own_s * (after + columns.hurry * others)
        return cost_s

    def _cheapest_by_length(
        self,
        positions: NDArray[np.intp],
        cost_s: Floats,
        shortage_s: Floats,
        hurry: Floats,
        prompt_tokens: int,
    ) -> InstanceView:
        """With a penalty: cheapest first, and no further than one can still cost least."""
        costs = self._costs
        least, found = (inf, 0), 0
        order = cost_s[positions].argsort(kind="stable").tolist()
        for rank in order:
            position = int(positions[rank])
            total_s = float(cost_s[position])
            if total_s > least[0]:
                break
            dearer_s = costs.dearer_s(self._instances[position], prompt_tokens, self._longest[position])
            total_s += float(hurry[position]) * costs.expected_tokens * dearer_s
            total_s += float(shortage_s[position])
            if (total_s, rank) < least:
                least, found = (total_s, rank), position
        return self._instances[found]

    # ---- columns

    def renew(self, costs: Costs, instances: Sequence[InstanceView]) -> None:
        """What follows is about these; works out what has changed."""
        kept = self._instances
        count = len(instances)
        all_anew = costs is not self._costs or len(kept) != count
        changed: list[int] = []
        if not all_anew:
            changed = list(compress(range(count), map(is_not, kept, instances)))
            all_anew = any(kept[n].instance_id != instances[n].instance_id for n in changed)
        if all_anew:
            changed = list(range(count))
            self._costs = costs
            self._instances = []
            self._at = {instance.instance_id: n for n, instance in enumerate(instances)}
            self._table = np.empty((len(_Columns._fields), count))
            self._queues = {}
            self._longest = [0] * count
            self._not_active = set()
            self._pooled = set()
        if not changed:
            return
        rows = [self._read(n, instances[n]) for n in changed]
        values = np.fromiter(chain.from_iterable(rows), np.float64, count=_WIDTH * len(rows))
        columns = values.reshape(len(rows), _WIDTH).T
        split = len(_Reported._fields)
        worked_out = _work_out(costs, _Reported(*columns[:split]), StepTimes(*columns[split:]))
        self._table[:, np.array(changed, dtype=np.intp)] = worked_out
        if costs.penalty is not None:
            for n in changed:
                self._longest[n] = Longest.of(instances[n]).tokens
        self._instances = list(instances)

    def _read(self, position: int, instance: InstanceView) -> tuple[float, ...]:
        """`_Reported` and step times of one instance; what is no number is kept by the way."""
        if instance.state is InstanceState.ACTIVE:
            self._not_active.discard(position)
        else:
            self._not_active.add(position)
        if instance.pool is None:
            self._pooled.discard(position)
        else:
            self._pooled.add(position)
        steps = self._costs.steps_of(instance)
        backlog = instance.prefill_backlog_tokens
        waiting = prompts(instance) if backlog else ()
        tokens = 0
        if waiting:
            queue = self._queues[position] = Queue.of(waiting, backlog, steps)
            tokens = queue.tokens[-1]
        else:
            self._queues.pop(position, None)
        counted = instance.phase_load or phase_load(instance.requests)
        return (
            instance.running,
            instance.waiting,
            instance.kv_used_tokens,
            backlog,
            instance.host_kv_tokens,
            instance.kv_capacity_tokens,
            counted.reasoning,
            max(instance.future_load, default=-inf),
            len(waiting),
            tokens,
            *_COEFFICIENTS(steps),
        )


def _work_out(costs: Costs, reported: _Reported, steps: StepTimes[Floats]) -> _Columns:
    running, used = reported.running, reported.used
    requests = running + reported.waiting
    held = used + reported.backlog
    step_s = steps.decode_s(running, used)
    hurry = _hurry(costs, reported, step_s)
    joining_s = joining_s_per_token = np.zeros(len(running))
    if costs.penalty is None:
        each = hurry * costs.expected_tokens
        joining_s = each * (steps.decode_s(requests, held) + (requests + 1.0) * steps.per_request_s)
        joining_s_per_token = each * (requests + 1.0) * steps.per_kv_token_s
    unknown = np.maximum(0.0, reported.backlog - reported.prompt_tokens)
    return _Columns(
        per_token_s=steps.per_token_s,
        per_token_squared_s=steps.per_token_squared_s,
        chunk_tokens=steps.chunk_tokens,
        step_s=step_s,
        hurry=hurry,
        joining_s=joining_s,
        joining_s_per_token=joining_s_per_token,
        requests=requests,
        unknown=unknown,
        unknown_s=steps.backlog_s(unknown, np.maximum(1.0, reported.waiting - reported.prompts)),
        spoken_for=np.maximum(held + reported.host, reported.future),
        capacity=reported.capacity,
        used=np.maximum(1.0, used),
    )


def _hurry(costs: Costs, reported: _Reported, step_s: Floats) -> Floats:
    """What a second of those who decode there counts, from 0 to 1.

    Reasoning is a wait for the first token, and counts whole. Who reads an answer is not late yet, and counts
    by how much of the TPOT SLO a step takes.
    """
    prompts = reported.prompts
    decoding = np.maximum(1.0, reported.running + reported.waiting - prompts)
    reasons = np.minimum(1.0, np.maximum(0.0, reported.reasoning - prompts) / decoding)
    hurry: Floats = reasons + (1.0 - reasons) * np.minimum(1.0, step_s / costs.tpot_slo_s)
    return hurry
