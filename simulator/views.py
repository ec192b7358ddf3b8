"""What a policy sees of the simulated cluster: each instance's last report, corrected as the scheduler does.

Steady reports are captured every `interval_s` and known `delay_s` later. In between, as in the live
scheduler: placements, and migrations under way to an instance, are counted in at once; requests that end or
move are counted out and in. With `interval_s` 0 views are exact.

A view is valid during the call that it is handed to: the mapping of instances is reused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import overload

from simulator.cluster import ClusterSpec
from simulator.instance import Instance
from simulator.job import Job, JobState
from simulator.migration import Migration
from tailrace.cluster import (
    ClusterView,
    InstanceView,
    Phase,
    PhaseLoad,
    RequestState,
    RequestView,
    Stage,
)
from tailrace.intra.base import IntraPolicy
from tailrace.qoe import slack_tokens

# A job, its output tokens and its KV blocks at the time of a report.
Row = tuple[Job, int, JobState, int]

_STATES: Mapping[JobState, RequestState] = {
    JobState.QUEUED: RequestState.WAITING,
    JobState.SWAPPED: RequestState.PREEMPTED,
    JobState.PREFILLING: RequestState.RUNNING,
    JobState.DECODING: RequestState.RUNNING,
    JobState.PAUSED: RequestState.PAUSED,
}


class Report:
    """One instance at one moment."""

    __slots__ = (
        "_boundary",
        "_instance",
        "_rows",
        "at_s",
        "backlog",
        "context",
        "host_tokens",
        "kv_used",
        "placed_before",
        "running",
        "step_s",
        "waiting",
    )

    def __init__(self, instance: Instance, now: float, placed_before: int) -> None:
        boundary = instance.begun_boundary(now)
        size = instance.block_tokens
        self.at_s = now
        # Placements counted so far: those are in the report.
        self.placed_before = placed_before
        self.running = len(instance.decoding) + len(instance.prefilling) + len(instance.paused)
        self.waiting = len(instance.waiting)
        self.kv_used = instance.used_blocks_at(boundary) * size
        self.context = instance.context_at(boundary)
        self.backlog = instance.backlog_at(boundary)
        self.host_tokens = instance.host_blocks * size
        self.step_s = instance.step_s
        self._instance = instance
        self._boundary = boundary
        self._rows: list[Row] | None = None

    @property
    def rows(self) -> list[Row]:
        """Its requests. Taken down at the first look, which must come before anything changes there."""
        if self._rows is None:
            instance, boundary, decoding = self._instance, self._boundary, JobState.DECODING
            rows: list[Row] = [
                (job, job.tokens + boundary - job.joined, decoding, -1) for job in instance.decoding
            ]
            rows += [(job, job.tokens, job.state, job.blocks) for job in instance.paused]
            rows += [(job, job.tokens, job.state, job.blocks) for _, job in instance.prefilling]
            rows += [(job, job.tokens, job.state, job.blocks) for _, job in instance.waiting]
            self._rows = rows
        return self._rows

    def take_down(self) -> Report:
        """The same report, good for later."""
        assert self.rows is not None
        return self


class ReportedRequests(Sequence[RequestView]):
    """An instance's requests, made only if somebody looks."""

    __slots__ = ("_instance", "_made", "_pending", "_report", "_told", "_views")

    def __init__(
        self,
        views: Views,
        instance: Instance,
        report: Report,
        told: Mapping[Job, int],
        pending: Sequence[Job],
    ) -> None:
        self._views = views
        self._instance = instance
        self._report = report
        self._told = told
        self._pending = pending
        self._made: tuple[RequestView, ...] | None = None

    def _all(self) -> tuple[RequestView, ...]:
        if self._made is None:
            self._made = self._views.make(self._instance, self._report, self._told, self._pending)
        return self._made

    def phase_load(self, quantum_tokens: int, without: str) -> PhaseLoad:
        """As tailrace.policy.phase_load counts them, without making a view of each."""
        rows = self._views.rows(self._instance, self._report, self._told, self._pending)
        return self._views.phase_load(rows, self._report.at_s, quantum_tokens, without)

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


class _Known:
    """What the scheduler knows of one instance."""

    __slots__ = ("context_change", "instance", "kv_change", "pending", "report", "running_change", "told")

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.report = Report(instance, 0.0, 0).take_down()
        # Placements that no report shows yet: job -> running number.
        self.pending: dict[Job, int] = {}
        self.forget_changes()

    def forget_changes(self) -> None:
        """A new report has them."""
        self.running_change = 0
        self.context_change = 0
        self.kv_change = 0
        # Requests that came to be decoding here, or entered a phase: job -> output tokens then.
        self.told: dict[Job, int] = {}


class Views:
    """Builds ClusterViews, only what has changed anew."""

    def __init__(self, spec: ClusterSpec, instances: Sequence[Instance], intra: IntraPolicy) -> None:
        self._spec = spec
        self._intra = intra
        self._exact = spec.report.interval_s <= 0.0
        ordered = sorted(instances, key=lambda instance: instance.instance_id)
        self._known = {instance.instance_id: _Known(instance) for instance in ordered}
        self._placed = 0
        self._dirty: set[str] = set(self._known)
        self._views: dict[str, InstanceView] = dict.fromkeys(self._known, InstanceView(""))
        self._mapping = MappingProxyType(self._views)

    # ---- what happens

    def capture(self, now: float) -> list[Report]:
        """Reports of all instances, in order."""
        return [Report(known.instance, now, self._placed).take_down() for known in self._known.values()]

    def publish(self, reports: Sequence[Report]) -> None:
        """The reports have arrived."""
        for (name, known), report in zip(self._known.items(), reports, strict=True):
            known.report = report
            known.forget_changes()
            if known.pending:
                known.pending = {job: n for job, n in known.pending.items() if n > report.placed_before}
            for job in known.pending:
                known.context_change += job.prompt
            self._dirty.add(name)

    def placed(self, job: Job, instance: Instance) -> None:
        """The scheduler sent a request there."""
        if self._exact:
            return
        self._placed += 1
        known = self._known[instance.instance_id]
        known.pending[job] = self._placed
        known.context_change += job.prompt
        self._dirty.add(instance.instance_id)

    def entered(self, job: Job, instance: Instance, tokens: int) -> None:
        """A phase event has arrived: the request was decoding there with so many output tokens."""
        if self._exact or job.instance is not instance:
            return
        known = self._known[instance.instance_id]
        if known.pending.pop(job, None) is not None:
            known.running_change += 1
            known.kv_change += job.prompt + tokens
        known.told[job] = tokens
        self._dirty.add(instance.instance_id)

    def left(self, job: Job, instance: Instance, tokens: int) -> None:
        """A request ended on an instance, or has moved away from it."""
        if self._exact:
            return
        known = self._known[instance.instance_id]
        context = job.prompt + tokens
        known.context_change -= context
        if known.pending.pop(job, None) is None:
            known.running_change -= 1
            known.kv_change -= context
        known.told.pop(job, None)
        self._dirty.add(instance.instance_id)

    def coming(self, migration: Migration) -> None:
        """A migration was opened: its target will need the room."""
        if self._exact:
            return
        self._known[migration.target.instance_id].kv_change += migration.asked_tokens
        self.touch(migration.source, migration.target)

    def not_coming(self, migration: Migration) -> None:
        """A migration was given up."""
        if self._exact:
            return
        self._known[migration.target.instance_id].kv_change -= migration.asked_tokens
        self.touch(migration.source, migration.target)

    def came(self, migration: Migration) -> None:
        """A migration was committed; the target's KV was counted in when it was opened."""
        if self._exact:
            return
        job = migration.job
        self.left(job, migration.source, job.tokens)
        known = self._known[migration.target.instance_id]
        known.running_change += 1
        known.context_change += job.prompt + job.tokens
        known.told[job] = job.tokens
        self.touch(migration.source, migration.target)

    def touch(self, *instances: Instance) -> None:
        """Something else about these changed."""
        self._dirty.update(instance.instance_id for instance in instances)

    # ---- what a policy sees

    def view(self, stages: tuple[Stage, ...], now: float) -> ClusterView:
        """The cluster as it is known now."""
        if self._exact:
            for name, known in self._known.items():
                known.report = Report(known.instance, now, 0)
                self._views[name] = self._instance_view(known)
        elif self._dirty:
            for name in self._dirty:
                self._views[name] = self._instance_view(self._known[name])
            self._dirty.clear()
        return ClusterView(self._mapping, stages)

    def _instance_view(self, known: _Known) -> InstanceView:
        instance, report = known.instance, known.report
        spec = instance.spec
        pending = known.pending
        future: tuple[float, ...] = ()
        if self._spec.future_load is not None:
            future = self._spec.future_load(
                [(job.prompt + tokens, self._remaining(job, tokens)) for job, tokens, _, _ in report.rows]
            )
        capacity = instance.total_blocks * instance.block_tokens
        return InstanceView(
            instance_id=instance.instance_id,
            pool=instance.pool,
            kv_capacity_tokens=capacity,
            kv_used_tokens=min(capacity, max(0, report.kv_used + known.kv_change)),
            block_tokens=instance.block_tokens,
            max_model_len=spec.max_model_len,
            running=max(0, report.running + known.running_change),
            waiting=report.waiting + len(pending),
            prefill_backlog_tokens=report.backlog + sum(job.prompt for job in pending),
            context_tokens=max(0, report.context + known.context_change),
            token_interval_s=report.step_s,
            host_kv_tokens=report.host_tokens,
            max_running_tokens=spec.max_running_tokens,
            future_load=future,
            migrations_in=instance.migrations_in,
            migrations_out=instance.migrations_out,
            requests=ReportedRequests(self, instance, report, dict(known.told), tuple(pending)),
        )

    def make(
        self, instance: Instance, report: Report, told: Mapping[Job, int], pending: Sequence[Job]
    ) -> tuple[RequestView, ...]:
        """The requests of a report that are still there, moved on by events, and those come since."""
        return tuple(
            self.request_view(job, instance, tokens, state, blocks, report.at_s)
            for job, tokens, state, blocks in self.rows(instance, report, told, pending)
        )

    def rows(
        self, instance: Instance, report: Report, told: Mapping[Job, int], pending: Sequence[Job]
    ) -> Iterator[Row]:
        """The same, before views are made of them."""
        rows: Iterable[Row] = report.rows
        if told or pending:
            by_job: dict[Job, Row] = {row[0]: row for row in rows}
            for job, tokens in told.items():
                if job not in by_job or by_job[job][1] < tokens:
                    by_job[job] = (job, tokens, JobState.DECODING, -1)
            for job in pending:
                by_job.setdefault(job, (job, 0, JobState.QUEUED, 0))
            rows = by_job.values()
        done = JobState.DONE
        return (row for row in rows if row[0].instance is instance and row[0].state is not done)

    def phase_load(self, rows: Iterable[Row], at_s: float, quantum_tokens: int, without: str) -> PhaseLoad:
        """Rows counted as tailrace.policy.phase_load does with views of them."""
        reasoning = fresh = 0
        least = math.inf
        pace_s = self._spec.tpot_target_s
        demoted = self._intra.demoted
        for job, tokens, _, _ in rows:
            if without and job.request.request_id == without:
                continue
            answered = tokens - job.reasoning
            if answered < 0 or not tokens:
                reasoning += not (tokens and demoted(job.view(tokens)))
                continue
            fresh += answered < quantum_tokens
            if answered > 0 and job.first_answer_s is not None:
                least = min(least, slack_tokens(answered, at_s - job.first_answer_s, pace_s))
        return PhaseLoad(reasoning, fresh, least)

    def request_view(
        self, job: Job, instance: Instance, tokens: int, state: JobState, blocks: int, now: float
    ) -> RequestView:
        """One request; `blocks` -1: what its context needs if it is on the device."""
        context = job.prompt + tokens
        size = instance.block_tokens
        if blocks < 0:
            blocks = -(-context // size) if state is JobState.DECODING else 0
        elif state is JobState.SWAPPED:
            blocks = 0
        phase = job.phase_of(tokens)
        answering = phase is Phase.ANSWERING
        slack: float | None = None
        if answering and job.first_answer_s is not None and tokens > job.reasoning:
            since_s = now - job.first_answer_s
            slack = slack_tokens(tokens - job.reasoning, since_s, self._spec.tpot_target_s)
        return RequestView(
            request_id=job.request.request_id,
            instance_id=instance.instance_id,
            phase=phase,
            state=_STATES[state],
            prompt_tokens=job.prompt,
            output_tokens=tokens,
            max_tokens=self._spec.max_tokens,
            epoch=job.migrations,
            reasoning_tokens=min(tokens, job.reasoning),
            kv_tokens=blocks * size,
            arrival_s=job.request.arrival_s,
            token_interval_s=instance.step_s,
            migrating=job.migration is not None,
            pacer_slack_tokens=slack,
            predicted_remaining_tokens=self._remaining(job, tokens),
            phase_tokens=tokens - job.reasoning if answering else tokens,
            demoted=phase is Phase.REASONING and self._intra.demoted(job.view(tokens)),
        )

    def _remaining(self, job: Job, tokens: int) -> float | None:
        predictor = self._spec.predictor
        return None if predictor is None else predictor.remaining(job.request, tokens)
