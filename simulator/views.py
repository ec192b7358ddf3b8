"""Views for policies of the simulated cluster: each instance's last report, corrected as by the live
scheduler.

Periodic reports are captured every `interval_s` seconds and published `delay_s` later. In between, placements
and migrations towards an instance are added at once, and requests that end or move are subtracted and added
as events arrive. With an `interval_s` of 0, views are exact.

A view is valid only during the call that receives it: the mapping of instances is reused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from simulator.blocks import blocks_for
from simulator.cluster import ClusterSpec
from simulator.events import NEVER
from simulator.instance import Instance
from simulator.job import Job, JobState
from simulator.migration import Migration
from simulator.reports import Report, Row, blocks_of, forecast
from tailrace.actions import WhenFull
from tailrace.cluster import ClusterView, InstanceView, Phase, PhaseLoad, RequestState, RequestView, Stage
from tailrace.control.cluster_model import ClusterModel, Corrections, CountedRequest, Pending
from tailrace.control.hot_prefixes import HotTracker, PrefixSource
from tailrace.intra.base import IntraPolicy
from tailrace.perf.measured import Measured
from tailrace.perf.remaining import limited, tokens_left
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.candidates import kv_needed_tokens
from tailrace.policy.requests import Prompt, Reasoning, RequestTable
from tailrace.qoe import slack_tokens

_STATES: Mapping[JobState, RequestState] = {
    JobState.QUEUED: RequestState.WAITING,
    JobState.SWAPPED: RequestState.PREEMPTED,
    JobState.PREFILLING: RequestState.RUNNING,
    JobState.DECODING: RequestState.RUNNING,
    JobState.PAUSED: RequestState.PAUSED,
}


# As in ReportedInstance: a paused request keeps its slot.
_WAITING = frozenset({JobState.QUEUED, JobState.SWAPPED})

_NO_UPDATES: Mapping[Job, CountedRequest] = MappingProxyType({})


class JobTable(RequestTable):
    """The requests of an instance, whose views are made only on access; counts and prompts without any."""

    __slots__ = ("_instance", "_model", "_pending", "_report", "_updates")

    def __init__(
        self,
        model: Views,
        instance: Instance,
        report: Report,
        updates: Mapping[Job, CountedRequest],
        pending: Sequence[Job],
    ) -> None:
        super().__init__()
        self._model = model
        self._instance = instance
        self._report = report
        self._updates = updates
        self._pending = pending

    def make_views(self) -> tuple[RequestView, ...]:
        """Make the views of all requests, once."""
        return self._model.build(self._instance, self._report, self._updates, self._pending)

    def prompts(self) -> Sequence[Prompt]:
        """Return the prompts of the requests without an output token."""
        return [(job.request.arrival_s, job.prompt) for job, tokens, _, _ in self._jobs() if not tokens]

    def reasoning(self) -> Reasoning:
        """Return the sums of the requests that reason."""
        return self._model.reasoning(self._jobs())

    def _count(self, quantum_tokens: int, without: str) -> PhaseLoad:
        return self._model.phase_load(self._jobs(), self._report.at_s, quantum_tokens, without)

    def _jobs(self) -> Iterator[Row]:
        return self._model.rows(self._instance, self._report, self._updates, self._pending)


class _InstanceState(Corrections[Job, Pending]):
    """The scheduler's state of one instance. Placements are pending in the order they were made."""

    __slots__ = ("departed", "instance", "pending_s", "report", "ttft", "updates")

    def __init__(self, instance: Instance, ttft: TtftPredictor) -> None:
        super().__init__()
        self.instance = instance
        self.ttft = ttft
        self.report = Report(instance, 0.0, 0)
        # Seconds that the prompts of pending placements take.
        self.pending_s = 0.0
        # Requests that started decoding here or entered a phase since the report, as of that event.
        self.updates: dict[Job, CountedRequest] = {}
        # Requests in the report that have left since.
        self.departed: set[Job] = set()

    def add_placement(self, job: Job, number: int) -> None:
        """Add a placement that no report shows yet."""
        self.add_pending(job, Pending(job.prompt, job.expected_cached, number))
        self.pending_s += self._prefill_s(job)

    def remove_placement(self, job: Job) -> bool:
        """Remove a placement that has begun or left. Return whether it was still pending."""
        if self.remove_pending(job) is None:
            return False
        self.pending_s = self.pending_s - self._prefill_s(job) if self.pending else 0.0
        return True

    def counted_request(self, job: Job) -> CountedRequest | None:
        """Return the request as included in the counts, or None if it is not."""
        update = self.updates.get(job)
        if update is not None:
            return update
        row = self.report.by_job.get(job)
        if row is None or job in self.departed:
            return None
        _, tokens, state, _ = row
        size = self.instance.block_tokens
        return CountedRequest(job.prompt + tokens, blocks_of(row, size) * size, state not in _WAITING)

    def record_decoding(self, job: Job, tokens: int) -> None:
        """Record that the request is decoding here and has produced this many output tokens."""
        context = job.prompt + tokens
        before = None if self.remove_placement(job) else self.counted_request(job)
        if before is None:
            after = self._decoding(context)
            self.add_request(job, after)
        else:
            after = CountedRequest(max(context, before.context_tokens), before.kv_tokens, has_slot=True)
            self.change_request(before, after)
        self.updates[job] = after

    def record_arrival(self, job: Job, reserved: bool) -> None:
        """Record a request that migrated to here. `reserved`: the last report already counts its KV."""
        after = self.updates[job] = self._decoding(job.prompt + job.tokens)
        self.add_request(job, replace(after, kv_tokens=0) if reserved else after)

    def record_departure(self, job: Job) -> None:
        """Record that the request has ended or left."""
        if self.remove_placement(job):
            return
        before = self.counted_request(job)
        if before is not None:
            self.remove_request(before)
            self.updates.pop(job, None)
            self.departed.add(job)

    def _decoding(self, context_tokens: int) -> CountedRequest:
        size = self.instance.block_tokens
        return CountedRequest(context_tokens, blocks_for(context_tokens, size) * size, has_slot=True)

    def _prefill_s(self, job: Job) -> float:
        """Return the seconds of prefill that its placement did not expect to find cached."""
        whole_s = self.instance.prefill_s(job.prompt)
        return whole_s - self.instance.prefill_s(job.expected_cached) if job.expected_cached else whole_s

    @property
    def idle(self) -> bool:
        """Return whether the instance is empty and no event has changed that since its report."""
        return (
            self.report.empty
            and not self.pending
            and not self.coming
            and not self.updates
            and not (self.running_change or self.waiting_change or self.context_change or self.kv_change)
        )


class Views(ClusterModel[_InstanceState]):
    """The simulator's model of the cluster."""

    def __init__(
        self,
        spec: ClusterSpec,
        instances: Sequence[Instance],
        intra: IntraPolicy,
        prefixes: PrefixSource,
    ) -> None:
        super().__init__()
        self.hot = HotTracker(prefixes)
        self._stages = spec.stages
        self._spec = spec
        self._intra = intra
        self._exact = spec.report.interval_s <= 0.0
        # Whether a request's rank may drop while it reasons.
        self._demotes = type(intra).demoted is not IntraPolicy.demoted
        # Host memory counts as room for migrated requests only if a full target admits them there.
        self._host_imports = spec.migration.when_full is WhenFull.HOST
        ordered = sorted(instances, key=lambda instance: instance.instance_id)
        # Instances of one kind share a profile.
        profiles = {id(instance.spec.profile): instance.spec.profile for instance in ordered}
        curves = {key: TtftPredictor.of_profile(profile) for key, profile in profiles.items()}
        # Each kind of an unequal fleet has been profiled: one speed for all would be wrong for some.
        unequal = len(profiles) > 1
        step_tokens = spec.instances[0].chunk_budget_tokens
        self._measured = {
            key: Measured.of_profile(profile, step_tokens) for key, profile in profiles.items() if unequal
        }
        self._known = {
            instance.instance_id: _InstanceState(instance, curves[id(instance.spec.profile)])
            for instance in ordered
        }
        self._placements = 0
        # Open migrations that are included in their targets' counts.
        self._arrivals: dict[Job, Migration] = {}
        self._dirty.update(self._known)
        self._views = dict.fromkeys(self._known, InstanceView(""))
        self._mapping = MappingProxyType(self._views)

    # ---- events

    def capture(self, now: float) -> list[Report]:
        """Take a report of every instance, in id order."""
        reports = []
        placed = self._placements
        for known in self._known.values():
            report = Report(known.instance, now, placed)
            known.instance.snapshots.append(report)
            reports.append(report)
        return reports

    def publish(self, reports: Sequence[Report]) -> None:
        """Apply reports that have arrived."""
        dirty = self._dirty
        for (name, known), report in zip(self._known.items(), reports, strict=True):
            snapshots = known.instance.snapshots
            idle = report.empty and known.idle
            # No policy can read this report any more.
            superseded = report if idle else known.report
            if superseded in snapshots:
                snapshots.remove(superseded)
            if idle:
                continue
            known.report = report
            known.reset_changes()
            known.updates = {}
            known.departed = set()
            for job in known.coming:
                if _reserved(self._arrivals[job], report):
                    known.coming[job] = 0
            if known.pending:
                shown = [job for job, p in known.pending.items() if p.placed <= report.placed_before]
                for job in shown:
                    known.remove_placement(job)
            dirty.add(name)

    def request_placed(self, job: Job, instance: Instance) -> None:
        """Record that the scheduler placed a request on an instance."""
        if self._exact:
            return
        self._placements += 1
        known = self._known[instance.instance_id]
        known.add_placement(job, self._placements)
        self._dirty.add(instance.instance_id)

    def phase_entered(self, job: Job, instance: Instance, tokens: int) -> None:
        """Record a phase event: the request was decoding on the instance with this many output tokens."""
        if self._exact or job.instance_id != instance.instance_id:
            return
        self._known[instance.instance_id].record_decoding(job, tokens)
        self._dirty.add(instance.instance_id)

    def request_left(self, job: Job, instance: Instance) -> None:
        """Record that a request ended on an instance or migrated away from it, or that it was moved from its
        queue."""
        if self._exact:
            return
        self._known[instance.instance_id].record_departure(job)
        self._dirty.add(instance.instance_id)

    def migration_opened(self, migration: Migration) -> None:
        """Count a migration's room at its target.

        The scheduler learns of migrations that a target fetches by bid-ask only from reports.
        """
        if migration.on_closed is not None:
            return
        # An exact view includes the room already.
        size = migration.target.block_tokens
        kv_tokens = 0 if self._exact else kv_needed_tokens(migration.requested_tokens, size)
        known = self._known[migration.target.instance_id]
        self._arrivals[migration.job] = migration
        known.open_arrival(migration.job, kv_tokens, migration.requested_tokens)
        self.mark_dirty(migration.source, migration.target)

    def migration_aborted(self, migration: Migration) -> None:
        """Undo the counts of a migration that was aborted."""
        self._known[migration.target.instance_id].close_migration(migration.job)
        self._arrivals.pop(migration.job, None)
        self.mark_dirty(migration.source, migration.target)

    def migration_committed(self, migration: Migration) -> None:
        """Move the counts of a committed migration to its target."""
        known, job = self._known[migration.target.instance_id], migration.job
        if not self._exact:
            self.request_left(job, migration.source)
            # A migration that the target fetched is not counted yet, except for what a report shows.
            known.record_arrival(job, job not in known.coming and _reserved(migration, known.report))
            self.mark_dirty(migration.source, migration.target)
        known.close_migration(job)
        self._arrivals.pop(job, None)

    def mark_dirty(self, *instances: Instance) -> None:
        """Rebuild the views of these instances on the next access."""
        self._dirty.update(instance.instance_id for instance in instances)

    # ---- what a policy sees

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages in force."""
        return self._stages

    def set_stages(self, stages: tuple[Stage, ...]) -> None:
        """Replace the stages."""
        self._stages = stages

    def view_at(self, now_s: float) -> ClusterView:
        """Return the cluster as the scheduler knows it now."""
        if self._exact:
            for known in self._known.values():
                known.report = Report(known.instance, now_s, 0)
            self._renew(self._known)
        elif self._dirty:
            self._renew(self._dirty)
            self._dirty.clear()
        return ClusterView(self._mapping, self._stages)

    def _renew(self, instance_ids: Iterable[str]) -> None:
        future_load = self._spec.future_load
        if future_load is not None:
            known, spec = self._known, self._spec
            reports = (known[name].report for name in instance_ids)
            forecast(reports, future_load, spec.predictor, spec.max_tokens)
        super()._renew(instance_ids)

    def _instance_view(self, instance_id: str) -> InstanceView:
        known = self._known[instance_id]
        instance, report = known.instance, known.report
        report.read_counts()
        spec = instance.spec
        block_tokens = instance.block_tokens
        capacity = instance.total_blocks * block_tokens
        running, waiting, context, used = known.counts(
            report.running, report.waiting, report.context, report.kv_used
        )
        pending_tokens = known.pending_tokens - known.pending_cached_tokens
        backlog = report.backlog + pending_tokens
        updates, pending = known.updates, known.pending
        return InstanceView(
            instance_id=instance.instance_id,
            pool=instance.pool,
            kv_capacity_tokens=capacity,
            kv_used_tokens=used if used < capacity else capacity,
            block_tokens=block_tokens,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            running=running,
            waiting=waiting,
            prefill_backlog_tokens=backlog,
            context_tokens=context,
            token_interval_s=report.token_interval_s,
            host_kv_tokens=report.host,
            host_kv_capacity_tokens=instance.host_capacity_blocks * block_tokens if self._host_imports else 0,
            prefill_delay_s=report.prefill_delay_s(pending_tokens, known.pending_s),
            ttft=known.ttft,
            measured=self._measured.get(id(spec.profile)),
            max_running_tokens=spec.max_running_tokens,
            future_load=report.future or (),
            migrations_in=instance.migrations_in,
            migrations_out=instance.migrations_out,
            coming_tokens=sum(known.coming_context.values()),
            migration_tokens_per_s=None
            if report.incoming_bytes_per_s is None
            else report.incoming_bytes_per_s / spec.profile.kv_bytes_per_token,
            requests=JobTable(
                self, instance, report, dict(updates) if updates else _NO_UPDATES, tuple(pending)
            ),
        )

    def build(
        self,
        instance: Instance,
        report: Report,
        updates: Mapping[Job, CountedRequest],
        pending: Sequence[Job],
    ) -> tuple[RequestView, ...]:
        """Return the requests of a report that are still there, updated by events, and those that arrived
        since."""
        return tuple(
            self.request_view(job, instance, tokens, state, blocks, report.token_interval_s, report.at_s)
            for job, tokens, state, blocks in self.rows(instance, report, updates, pending)
        )

    def rows(
        self,
        instance: Instance,
        report: Report,
        updates: Mapping[Job, CountedRequest],
        pending: Sequence[Job],
    ) -> Iterator[Row]:
        """Return the same requests as rows, before views are built."""
        rows: Iterable[Row] = report.rows
        if updates or pending:
            by_job = dict(report.by_job)
            for job, counted in updates.items():
                tokens = counted.context_tokens - job.prompt
                if job not in by_job or by_job[job][1] < tokens:
                    by_job[job] = (job, tokens, JobState.DECODING, -1)
            for job in pending:
                by_job.setdefault(job, (job, 0, JobState.QUEUED, 0))
            rows = by_job.values()
        done, instance_id = JobState.DONE, instance.instance_id
        return (row for row in rows if row[0].instance_id == instance_id and row[0].state is not done)

    def phase_load(self, rows: Iterable[Row], at_s: float, quantum_tokens: int, without: str) -> PhaseLoad:
        """Count rows as `RequestTable.phase_load` counts views of them."""
        reasoning = fresh = 0
        # Tokens delivered beyond what a reader has consumed since the start of the simulation; the least of
        # them.
        least = math.inf
        pace_s = self._spec.tpot_target_s
        demotes = self._demotes
        for job, tokens, state, _ in rows:
            if without and job.request.request_id == without:
                continue
            answered = tokens - job.reasoning
            if answered < 0 or not tokens:
                if not (demotes and tokens and self._demoted(job, tokens)):
                    reasoning += 1
                continue
            if answered < quantum_tokens:
                fresh += 1
            if answered > 0:
                first_s = job.first_answer_s
                if first_s is not None:
                    ahead = answered + first_s / pace_s
                    if ahead < least:
                        least = ahead
            elif state is JobState.SWAPPED or state is JobState.QUEUED:
                least = -math.inf
        return PhaseLoad(reasoning, fresh, least - (at_s / pace_s + 1.0), quantum_tokens)

    def reasoning(self, rows: Iterable[Row]) -> Reasoning:
        """Return the sums of rows as `RequestTable.reasoning` returns those of views of them."""
        requests = output_tokens = 0
        arrivals_s = 0.0
        for job, tokens, _, _ in rows:
            if 0 < tokens < job.reasoning and not (self._demotes and self._demoted(job, tokens)):
                requests += 1
                arrivals_s += job.request.arrival_s
                output_tokens += tokens
        return Reasoning(requests, arrivals_s, output_tokens)

    def _demoted(self, job: Job, tokens: int) -> bool:
        """Return whether the job is demoted; the policy is asked only when the rank may have changed."""
        if not job.demotion_since <= tokens < job.demotion_until:
            view = job.view(tokens)
            holds = self._intra.rank_holds(view)
            job.demoted = self._intra.demoted(view)
            job.demotion_since = tokens
            job.demotion_until = NEVER if holds is None else tokens + holds
        return job.demoted

    def request_view(
        self,
        job: Job,
        instance: Instance,
        tokens: int,
        state: JobState,
        blocks: int,
        token_interval_s: float,
        now: float,
    ) -> RequestView:
        """Return the view of one request; `blocks` -1: as many as its context needs on the device."""
        context = job.prompt + tokens
        size = instance.block_tokens
        host_blocks = blocks if state is JobState.SWAPPED else 0
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
            host_kv_tokens=host_blocks * size,
            arrival_s=job.request.arrival_s,
            token_interval_s=token_interval_s,
            migrating=job.migrating or job.on_offer,
            pacer_slack_tokens=slack,
            predicted_remaining_tokens=self._remaining(job, tokens, instance.spec.max_model_len),
            phase_tokens=tokens - job.reasoning if answering else tokens,
            demoted=self._demotes and phase is Phase.REASONING and self._demoted(job, tokens),
        )

    def _remaining(self, job: Job, tokens: int, max_model_len: int) -> float | None:
        predictor = self._spec.predictor
        if predictor is None:
            return None
        remaining = tokens_left(job.prompt, tokens, self._spec.max_tokens, max_model_len)
        return limited(predictor.remaining(job.request, tokens), remaining)


def _reserved(migration: Migration, report: Report) -> bool:
    """Return whether the report includes the room reserved for the migration."""
    return migration.reserved_s is not None and migration.reserved_s <= report.at_s
