"""What a policy sees of the simulated cluster: each instance's last report, corrected as the scheduler does.

Steady reports are captured every `interval_s` and known `delay_s` later. In between, as in the live
scheduler: placements, and migrations under way to an instance, are counted in at once; requests that end or
move are counted out and in. With `interval_s` 0 views are exact.

A view is valid during the call that it is handed to: the mapping of instances is reused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import overload

from simulator.blocks import blocks_for
from simulator.cluster import ClusterSpec
from simulator.events import NEVER
from simulator.instance import Instance
from simulator.job import Job, JobState
from simulator.migration import Migration
from simulator.reports import Report, Row, blocks_of, foresee
from tailrace.actions import WhenFull
from tailrace.cluster import ClusterView, InstanceView, Phase, PhaseLoad, RequestState, RequestView, Stage
from tailrace.control.cluster_model import ClusterModel, Corrections, CountedRequest, Pending
from tailrace.control.hot_prefixes import HotTracker, PrefixSource
from tailrace.intra.base import IntraPolicy
from tailrace.lengths import limited, tokens_left
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.candidates import kv_needed_tokens
from tailrace.policy.phase_load import CountsPhases, ListsPrompts, Prompt
from tailrace.qoe import slack_tokens

_STATES: Mapping[JobState, RequestState] = {
    JobState.QUEUED: RequestState.WAITING,
    JobState.SWAPPED: RequestState.PREEMPTED,
    JobState.PREFILLING: RequestState.RUNNING,
    JobState.DECODING: RequestState.RUNNING,
    JobState.PAUSED: RequestState.PAUSED,
}


# As ReportedInstance has it: what is paused has its seat.
_WAITING = frozenset({JobState.QUEUED, JobState.SWAPPED})

_NOTHING_TOLD: Mapping[Job, CountedRequest] = MappingProxyType({})


class ReportedRequests(CountsPhases, ListsPrompts, Sequence[RequestView]):
    """An instance's requests, made and counted only if somebody looks."""

    __slots__ = ("_counted", "_instance", "_made", "_pending", "_report", "_told", "_views")

    def __init__(
        self,
        views: Views,
        instance: Instance,
        report: Report,
        told: Mapping[Job, CountedRequest],
        pending: Sequence[Job],
    ) -> None:
        self._views = views
        self._instance = instance
        self._report = report
        self._told = told
        self._pending = pending
        self._made: tuple[RequestView, ...] | None = None
        self._counted: tuple[int, PhaseLoad] | None = None

    def _all(self) -> tuple[RequestView, ...]:
        if self._made is None:
            self._made = self._views.make(self._instance, self._report, self._told, self._pending)
        return self._made

    def phase_load(self, quantum_tokens: int, without: str) -> PhaseLoad:
        """As tailrace.policy.phase_load counts them, without making a view of each; all of them only once."""
        if not without and self._counted is not None and self._counted[0] == quantum_tokens:
            return self._counted[1]
        rows = self._views.rows(self._instance, self._report, self._told, self._pending)
        load = self._views.phase_load(rows, self._report.at_s, quantum_tokens, without)
        if not without:
            self._counted = (quantum_tokens, load)
        return load

    def prompts(self) -> list[Prompt]:
        """As `tailrace.policy.phase_load.prompts` tells them: those that have made no token."""
        rows = self._views.rows(self._instance, self._report, self._told, self._pending)
        return [(job.request.arrival_s, job.prompt) for job, tokens, _, _ in rows if not tokens]

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


class _Known(Corrections[Job, Pending]):
    """What the scheduler knows of one instance. Placements are pending in the order of their numbers."""

    __slots__ = ("ended", "instance", "pending_s", "report", "told", "ttft")

    def __init__(self, instance: Instance, ttft: TtftPredictor) -> None:
        super().__init__()
        self.instance = instance
        self.ttft = ttft
        self.report = Report(instance, 0.0, 0)
        # Seconds that the prompts of pending placements take.
        self.pending_s = 0.0
        # Requests that came to be decoding here, or entered a phase, as they were then.
        self.told: dict[Job, CountedRequest] = {}
        # Requests of the report that have gone.
        self.ended: set[Job] = set()

    def expect(self, job: Job, number: int) -> None:
        """A placement that no report shows yet."""
        self.add_pending(job, Pending(job.prompt, job.told_cached, number))
        self.pending_s += self._prefill_s(job)

    def expects_no_more(self, job: Job) -> bool:
        """It has begun, or gone; whether it was a placement that no report shows."""
        if self.remove_pending(job) is None:
            return False
        self.pending_s = self.pending_s - self._prefill_s(job) if self.pending else 0.0
        return True

    def counted(self, job: Job) -> CountedRequest | None:
        """The request as the counts have it; None: they do not."""
        told = self.told.get(job)
        if told is not None:
            return told
        row = self.report.by_job.get(job)
        if row is None or job in self.ended:
            return None
        _, tokens, state, _ = row
        size = self.instance.block_tokens
        return CountedRequest(job.prompt + tokens, blocks_of(row, size) * size, state not in _WAITING)

    def decodes(self, job: Job, tokens: int) -> None:
        """The request is decoding here, and has made so many output tokens."""
        context = job.prompt + tokens
        before = None if self.expects_no_more(job) else self.counted(job)
        if before is None:
            after = self._decoding(context)
            self.add_request(job, after)
        else:
            after = CountedRequest(max(context, before.context_tokens), before.kv_tokens, seated=True)
            self.change_request(before, after)
        self.told[job] = after

    def arrives(self, job: Job, reserved: bool) -> None:
        """The request has been handed over to here. `reserved`: the last report counts its KV."""
        after = self.told[job] = self._decoding(job.prompt + job.tokens)
        self.add_request(job, replace(after, kv_tokens=0) if reserved else after)

    def gone(self, job: Job) -> None:
        """The request has ended or left."""
        if self.expects_no_more(job):
            return
        before = self.counted(job)
        if before is not None:
            self.remove_request(before)
            self.told.pop(job, None)
            self.ended.add(job)

    def _decoding(self, context_tokens: int) -> CountedRequest:
        size = self.instance.block_tokens
        return CountedRequest(context_tokens, blocks_for(context_tokens, size) * size, seated=True)

    def _prefill_s(self, job: Job) -> float:
        """Of what its placement did not count on finding."""
        whole_s = self.instance.prefill_s(job.prompt)
        return whole_s - self.instance.prefill_s(job.told_cached) if job.told_cached else whole_s

    @property
    def quiet(self) -> bool:
        """Nothing is there and nothing has been heard of."""
        return (
            self.report.empty
            and not self.pending
            and not self.coming
            and not self.told
            and not (self.running_change or self.waiting_change or self.context_change or self.kv_change)
        )


class Views(ClusterModel[_Known]):
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
        # Whether the rank of a request may go down while it reasons.
        self._demotes = type(intra).demoted is not IntraPolicy.demoted
        # Host memory counts as room for migrated requests only where they are let in there.
        self._host_imports = spec.migration.when_full is WhenFull.HOST
        ordered = sorted(instances, key=lambda instance: instance.instance_id)
        # Instances of one kind share their profile.
        profiles = {id(instance.spec.profile): instance.spec.profile for instance in ordered}
        curves = {key: TtftPredictor.of_profile(profile) for key, profile in profiles.items()}
        self._known = {
            instance.instance_id: _Known(instance, curves[id(instance.spec.profile)]) for instance in ordered
        }
        self._placed = 0
        # Open migrations that are counted in at their targets.
        self._arrivals: dict[Job, Migration] = {}
        self._dirty.update(self._known)
        self._views = dict.fromkeys(self._known, InstanceView(""))
        self._mapping = MappingProxyType(self._views)

    # ---- what happens

    def capture(self, now: float) -> list[Report]:
        """Reports of all instances, in order."""
        reports = []
        placed = self._placed
        for known in self._known.values():
            report = Report(known.instance, now, placed)
            known.instance.watchers.append(report)
            reports.append(report)
        return reports

    def publish(self, reports: Sequence[Report]) -> None:
        """The reports have arrived."""
        dirty = self._dirty
        for (name, known), report in zip(self._known.items(), reports, strict=True):
            watchers = known.instance.watchers
            quiet = report.empty and known.quiet
            # Nobody will look at it any more.
            superseded = report if quiet else known.report
            if superseded in watchers:
                watchers.remove(superseded)
            if quiet:
                continue
            known.report = report
            known.reset_changes()
            known.told = {}
            known.ended = set()
            for job in known.coming:
                if _reserved(self._arrivals[job], report):
                    known.coming[job] = 0
            if known.pending:
                shown = [job for job, p in known.pending.items() if p.placed <= report.placed_before]
                for job in shown:
                    known.expects_no_more(job)
            dirty.add(name)

    def placed(self, job: Job, instance: Instance) -> None:
        """The scheduler sent a request there."""
        if self._exact:
            return
        self._placed += 1
        known = self._known[instance.instance_id]
        known.expect(job, self._placed)
        self._dirty.add(instance.instance_id)

    def entered(self, job: Job, instance: Instance, tokens: int) -> None:
        """A phase event has arrived: the request was decoding there with so many output tokens."""
        if self._exact or job.instance_id != instance.instance_id:
            return
        self._known[instance.instance_id].decodes(job, tokens)
        self._dirty.add(instance.instance_id)

    def left(self, job: Job, instance: Instance) -> None:
        """A request ended on an instance, or has moved away from it."""
        if self._exact:
            return
        self._known[instance.instance_id].gone(job)
        self._dirty.add(instance.instance_id)

    def withdrawn(self, job: Job, instance: Instance) -> None:
        """A prompt that waited on an instance is placed elsewhere."""
        if self._exact:
            return
        self._known[instance.instance_id].gone(job)
        self._dirty.add(instance.instance_id)

    def migration_opened(self, migration: Migration) -> None:
        """A migration was opened: its target will need the room.

        One that the target fetches, by bid-ask, the scheduler sees in reports alone.
        """
        if migration.ended is not None:
            return
        # An exact view has the room already.
        size = migration.target.block_tokens
        kv_tokens = 0 if self._exact else kv_needed_tokens(migration.asked_tokens, size)
        known = self._known[migration.target.instance_id]
        self._arrivals[migration.job] = migration
        known.open_arrival(migration.job, kv_tokens, migration.asked_tokens)
        self.touch(migration.source, migration.target)

    def migration_aborted(self, migration: Migration) -> None:
        """A migration was given up."""
        self._known[migration.target.instance_id].close_migration(migration.job)
        self._arrivals.pop(migration.job, None)
        self.touch(migration.source, migration.target)

    def migration_committed(self, migration: Migration) -> None:
        """A migration was committed."""
        known, job = self._known[migration.target.instance_id], migration.job
        if not self._exact:
            self.left(job, migration.source)
            # Of one that the target fetched nothing is counted yet, but for what a report shows.
            known.arrives(job, job not in known.coming and _reserved(migration, known.report))
            self.touch(migration.source, migration.target)
        known.close_migration(job)
        self._arrivals.pop(job, None)

    def touch(self, *instances: Instance) -> None:
        """Something else about these changed."""
        self._dirty.update(instance.instance_id for instance in instances)

    # ---- what a policy sees

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those in force."""
        return self._stages

    def set_stages(self, stages: tuple[Stage, ...]) -> None:
        """Other stages are in force from now on."""
        self._stages = stages

    def view_at(self, now_s: float) -> ClusterView:
        """The cluster as it is known now."""
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
            foresee(reports, future_load, spec.predictor, spec.max_tokens)
        super()._renew(instance_ids)

    def _instance_view(self, instance_id: str) -> InstanceView:
        known = self._known[instance_id]
        instance, report = known.instance, known.report
        report.look()
        spec = instance.spec
        block_tokens = instance.block_tokens
        capacity = instance.total_blocks * block_tokens
        running, waiting, context, used = known.counts(
            report.running, report.waiting, report.context, report.kv_used
        )
        pending_tokens = known.pending_tokens - known.pending_cached_tokens
        backlog = report.backlog + pending_tokens
        told, pending = known.told, known.pending
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
            max_running_tokens=spec.max_running_tokens,
            future_load=report.future or (),
            migrations_in=instance.migrations_in,
            migrations_out=instance.migrations_out,
            coming_tokens=sum(known.coming_context.values()),
            migration_tokens_per_s=None
            if report.incoming_bytes_per_s is None
            else report.incoming_bytes_per_s / spec.profile.kv_bytes_per_token,
            requests=ReportedRequests(
                self, instance, report, dict(told) if told else _NOTHING_TOLD, tuple(pending)
            ),
        )

    def make(
        self, instance: Instance, report: Report, told: Mapping[Job, CountedRequest], pending: Sequence[Job]
    ) -> tuple[RequestView, ...]:
        """The requests of a report that are still there, moved on by events, and those come since."""
        return tuple(
            self.request_view(job, instance, tokens, state, blocks, report.token_interval_s, report.at_s)
            for job, tokens, state, blocks in self.rows(instance, report, told, pending)
        )

    def rows(
        self, instance: Instance, report: Report, told: Mapping[Job, CountedRequest], pending: Sequence[Job]
    ) -> Iterator[Row]:
        """The same, before views are made of them."""
        rows: Iterable[Row] = report.rows
        if told or pending:
            by_job = dict(report.by_job)
            for job, counted in told.items():
                tokens = counted.context_tokens - job.prompt
                if job not in by_job or by_job[job][1] < tokens:
                    by_job[job] = (job, tokens, JobState.DECODING, -1)
            for job in pending:
                by_job.setdefault(job, (job, 0, JobState.QUEUED, 0))
            rows = by_job.values()
        done, here = JobState.DONE, instance.instance_id
        return (row for row in rows if row[0].instance_id == here and row[0].state is not done)

    def phase_load(self, rows: Iterable[Row], at_s: float, quantum_tokens: int, without: str) -> PhaseLoad:
        """Rows counted as tailrace.policy.phase_load does with views of them."""
        reasoning = fresh = 0
        # Of what a user has been given beyond what the time since the start of the simulation asks for.
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

    def _demoted(self, job: Job, tokens: int) -> bool:
        """Asked anew only when the job's rank may have changed, which demotion changes."""
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
        """One request; `blocks` -1: what its context needs if it is on the device."""
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
        left = tokens_left(job.prompt, tokens, self._spec.max_tokens, max_model_len)
        return limited(predictor.remaining(job.request, tokens), left)


def _reserved(migration: Migration, report: Report) -> bool:
    """Whether the report shows the room that was set aside for the migration."""
    return migration.reserved_s is not None and migration.reserved_s <= report.at_s
