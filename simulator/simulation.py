"""One simulation: events, instances, migrations and views put together, and the policy asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from simulator.bidding import Bidding
from simulator.blocks import blocks_for
from simulator.cluster import ClusterSpec
from simulator.events import NEVER, EventQueue
from simulator.instance import Instance
from simulator.job import Job, JobState
from simulator.known_prefixes import KnownPrefixes
from simulator.metrics import Concluded
from simulator.migration import Migration, Migrations
from simulator.network import Network
from simulator.prefix_cache import prefix_cache
from simulator.prefix_pulls import PrefixPulls
from simulator.records import MigrationOutcome, PlacementRecord, SimResult
from simulator.reports import Report
from simulator.request import SimRequest
from simulator.sampling import Sampler
from simulator.views import Views
from tailrace.actions import (
    Action,
    CopyPrefix,
    HandBack,
    Migrate,
    Offer,
    Place,
    Refuse,
    SetPool,
    SetStages,
    WhenFull,
)
from tailrace.cluster import Arrival, Stage, length_bounds
from tailrace.collector import collector_paused
from tailrace.control.admission import TtftAdmission
from tailrace.control.runner import Moment, PlainCalls, Point, PolicyRunner
from tailrace.intra.base import IntraPolicy
from tailrace.policy.base import Policy

# Ticks of the policy that may pass with nothing else going on before the simulation counts as stuck.
_IDLE_TICKS = 1_000


class SimulationError(Exception):
    """The simulation cannot go on: a policy named what does not exist, or requests can never run."""


class _Fixed:
    """One policy decides from beginning to end."""

    def __init__(self, policy: Policy, admission: TtftAdmission | None) -> None:
        self.policy = policy
        self.name = type(policy).__name__
        self.admission = admission


class Simulation:
    """State of one run."""

    def __init__(
        self,
        spec: ClusterSpec,
        requests: Sequence[SimRequest],
        policy: Policy,
        intra: IntraPolicy,
        *,
        seed: int,
        sample_interval_s: float | None,
        most_steps: int = NEVER,
        admission: TtftAdmission | None = None,
    ) -> None:
        """`most_steps`: longest run of steps that is jumped over at once; 1: none."""
        self._spec = spec
        self._policy = policy
        self._events = events = EventQueue()
        self.instances = [
            Instance(i, intra, events, self, most_steps, prefix_cache(i, requests)) for i in spec.instances
        ]
        self._by_id = {instance.instance_id: instance for instance in self.instances}
        self.jobs = [Job(request, order) for order, request in enumerate(_in_order(requests))]
        self._jobs_by_id = {job.request.request_id: job for job in self.jobs}
        if len(self._jobs_by_id) != len(self.jobs):
            raise ValueError("request ids are not distinct")
        self._prefixes = KnownPrefixes(self.instances, self._jobs_by_id)
        self._views = Views(spec, self.instances, intra, self._prefixes)
        network = Network(spec.link, events)
        self.migrations = Migrations(spec.migration, self._by_id, intra, events, network, self)
        self.pulls = PrefixPulls(network, events, spec.migration)
        self._runner = PolicyRunner(self._views, _Fixed(policy, admission), self, PlainCalls())
        self._sampler = Sampler(self.instances, spec.stages)
        self._sample_interval_s = sample_interval_s
        self.bidding = Bidding(
            self.instances, self._jobs_by_id, self.migrations, events, spec.migration.message_s, seed, self
        )
        self._given = [request.request_id for request in requests]
        self._concluded = Concluded(spec.tpot_target_s)
        self._next = 0
        self._placements = 0
        self._idle_ticks = 0
        self._views.keep_lengths(policy.lengths_period_s, 0.0)
        self._views.hot.track(policy.prefixes_period_s)
        # The monitor's clock is not the workload's.
        self._report_offset_s = random.Random(seed).random() * max(0.0, spec.report.interval_s)
        self._set_stage_ends(0.0)

    def run(self, progress: Callable[[float], None] | None) -> SimResult:
        """To the end of the last request. Raises SimulationError."""
        self._start()
        events, total, concluded = self._events, len(self.jobs), self._concluded
        now = 0.0
        told = 0
        while concluded.count < total:
            if not events:
                raise SimulationError(f"{total - concluded.count} requests can never run")
            now = events.step()
            if progress is not None and (concluded.count - told) * 200 >= total:
                told = concluded.count
                progress(told / total)
        if progress is not None:
            progress(1.0)
        records = concluded.records()
        return SimResult(
            requests=[records[request_id] for request_id in self._given],
            migrations=self.migrations.records,
            pulls=self.pulls.records,
            series=self._sampler.series(),
            events_processed=events.processed,
            end_s=now,
        )

    # ---- Listener (simulator/instance.py)

    def prefill_done(self, instance: Instance, job: Job, now: float) -> None:
        """Decision point: where to decode."""
        self._tell(instance, job, Point.PREFILL_DONE, now)

    def reasoning_ended(self, instance: Instance, job: Job, now: float) -> None:
        """Decision point: where to answer."""
        self._tell(instance, job, Point.REASONING_ENDED, now)

    def outgrown(self, instance: Instance, job: Job, now: float) -> None:
        """Decision point: the request outgrew its stage."""
        self._tell(instance, job, Point.LENGTH_BOUNDARY, now)

    def finished(self, instance: Instance, job: Job, now: float) -> None:
        """The request is done."""
        self.migrations.finished(job, now)
        self.bidding.finished(job, now)
        self._views.left(job, instance)
        self._views.count_finish(job.prompt, job.total, now)
        self._conclude(job)

    def preempted(self, instance: Instance, job: Job, now: float) -> None:
        """It lost its place, and with it the migration that may have been under way."""
        self.migrations.preempted(job, now)

    # ---- MigrationListener (simulator/migration.py)

    def migration_opened(self, migration: Migration) -> None:
        """Counted in at once, as the live scheduler does."""
        self._views.migration_opened(migration)

    def migration_closed(self, migration: Migration, outcome: MigrationOutcome) -> None:
        """Counted in at the target, or out again."""
        if outcome is MigrationOutcome.COMMITTED:
            self._views.migration_committed(migration)
        else:
            self._views.migration_aborted(migration)

    # ---- BiddingListener (simulator/bidding.py)

    def offer_changed(self, source: Instance) -> None:
        """A request on offer counts as being migrated, as the live scheduler has it."""
        self._views.touch(source)

    # ---- events

    def _start(self) -> None:
        events = self._events
        if self.jobs:
            events.at(self.jobs[0].request.arrival_s, self._arrive)
        if self._spec.report.interval_s > 0.0:
            events.background(self._report_offset_s, self._report)
        if self._policy.tick_interval_s is not None:
            events.background(self._policy.tick_interval_s, self._tick)
        if self._sample_interval_s is not None:
            events.background(0.0, self._sample)

    def _arrive(self, now: float) -> None:
        job = self.jobs[self._next]
        self._next += 1
        if self._next < len(self.jobs):
            self._events.at(self.jobs[self._next].request.arrival_s, self._arrive)
        arrival = self._arrival(job, now)
        self._placements += 1
        placement = self._runner.place(arrival, "", Moment(now, now))
        if isinstance(placement, Refuse):
            self._refuse(job, placement.reason)
            return
        instance = self._instance(placement.instance_id)
        refusal = self._too_long(job, instance)
        if refusal:
            self._refuse(job, refusal)
            return
        self._views.count_arrival(job.prompt, now)
        self._submit(job, instance, placement, arrival, now)

    def _arrival(self, job: Job, now: float) -> Arrival:
        request = job.request
        arrival = Arrival(request.request_id, job.prompt, self._spec.max_tokens, self._placements)
        if not request.unit_names and not request.session_id:
            return arrival
        names = request.unit_names[: request.named_prompt_units]
        return replace(
            arrival,
            cached=self._prefixes.held(names, request.unit_tokens, now),
            block_names=names,
            session_id=request.session_id,
        )

    def _too_long(self, job: Job, instance: Instance) -> str:
        """Why the instance could never run it; "": it could."""
        longest = min(instance.total_blocks * instance.block_tokens, instance.spec.max_model_len)
        tokens = job.prompt + job.total
        if tokens <= longest and blocks_for(tokens, instance.block_tokens) <= instance.total_blocks:
            return ""
        return f"{tokens} tokens: longer than {instance.instance_id} can hold"

    def _submit(self, job: Job, instance: Instance, placement: Place, arrival: Arrival, now: float) -> None:
        job.told_cached = arrival.found_tokens(instance.instance_id, placement.pull_from)
        self._prefixes.placed(instance, arrival.block_names, now)
        self._views.hot.arrived(arrival, job.request.unit_tokens, now)
        job.placements.append(PlacementRecord(now, instance.instance_id))
        self._views.placed(job, instance)
        self._carry_out(placement.also, now)
        holder = self._instance(placement.pull_from) if placement.pull_from else None
        self.pulls.submit(job, instance, holder, now)

    def _refuse(self, job: Job, reason: str) -> None:
        job.refused = reason
        job.state = JobState.DONE
        self._conclude(job)

    def _conclude(self, job: Job) -> None:
        self._concluded.add(job)

    def _tell(self, instance: Instance, job: Job, point: Point, now: float) -> None:
        tokens = job.tokens_at(instance.boundary)
        request = None
        if self._runner.has_handler(point):
            interval_s = instance.token_interval_s(now)
            request = self._views.request_view(job, instance, tokens, JobState.DECODING, -1, interval_s, now)

        def told(then: float) -> None:
            if job.state is JobState.DONE:
                return
            self._views.entered(job, instance, tokens)
            if request is not None:
                self._runner.request_changed(point, request, Moment(then, then))

        self._events.at(now + self._spec.report.delay_s, told)

    def _report(self, now: float) -> None:
        reports = self._views.capture(now)
        self._events.background(now + self._spec.report.delay_s, self._publisher(reports))
        self._events.background(now + self._spec.report.interval_s, self._report)

    def _publisher(self, reports: Sequence[Report]) -> Callable[[float], None]:
        return lambda _: self._views.publish(reports)

    def _tick(self, now: float) -> None:
        interval_s = self._policy.tick_interval_s
        assert interval_s is not None
        self._idle_ticks = 0 if self._events.foreground else self._idle_ticks + 1
        if self._idle_ticks > _IDLE_TICKS:
            raise SimulationError(f"{len(self.jobs) - self._concluded.count} requests can never run")
        self._runner.tick(Moment(now, now))
        self._events.background(now + interval_s, self._tick)

    def _sample(self, now: float) -> None:
        assert self._sample_interval_s is not None
        self._sampler.sample(now)
        self._events.background(now + self._sample_interval_s, self._sample)

    # ---- the policy

    def submit(self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE) -> None:
        """Carry out what was decided, now. What a full target does, the cluster's description says."""
        self._carry_out(actions, self._events.now)

    def _carry_out(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            match action:
                case Migrate():
                    job = self._job(action.request_id)
                    self.migrations.ask(action, job, self._instance(action.target_id), now)
                case Offer():
                    for name in action.receiver_ids:
                        self._instance(name)
                    self.bidding.offer(action, self._job(action.request_id), now)
                case HandBack():
                    self._hand_back(action, now)
                case CopyPrefix():
                    self._copy_prefix(action, now)
                case SetPool():
                    instance = self._instance(action.instance_id)
                    instance.pool = action.pool
                    self._views.touch(instance)
                    self._sampler.pool_changed(instance, now)
                case SetStages():
                    self._set_stages(action.stages, now)

    def _hand_back(self, action: HandBack, now: float) -> None:
        """The order goes to the instance, its word to the front end, and that one asks for a place."""
        source = self._instance(action.instance_id)
        jobs = [self._job(request_id) for request_id in action.request_ids]

        def place(then: float) -> None:
            for job in jobs:
                if source.waits(job):
                    self._place_elsewhere(job, source, then)

        self._events.at(now + 3 * self._spec.migration.message_s, place)

    def _copy_prefix(self, action: CopyPrefix, now: float) -> None:
        hot, target = self._views.hot, self._instance(action.target_id)
        if hot.add_copy(action, now):
            self.pulls.copy(
                self._job(action.request_id).request,
                self._instance(action.holder_id),
                target,
                action.tokens,
                now,
                lambda then: hot.end_copy(target.instance_id, then),
            )

    def _place_elsewhere(self, job: Job, source: Instance, now: float) -> None:
        arrival = replace(self._arrival(job, now), excluded=frozenset({source.instance_id}), admitted=True)
        self._placements += 1
        placement = self._runner.place(arrival, "", Moment(now, now))
        if isinstance(placement, Refuse):
            return
        target = self._instance(placement.instance_id)
        if self._too_long(job, target):
            return
        source.withdraw(job, now)
        self._views.withdrawn(job, source)
        self._submit(job, target, placement, arrival, now)

    def _set_stages(self, stages: tuple[Stage, ...], now: float) -> None:
        if stages == self._views.stages:
            return
        self._views.set_stages(stages)
        self._sampler.stages_changed(stages, now)
        self._set_stage_ends(now)

    def _set_stage_ends(self, now: float) -> None:
        bounds = length_bounds(self._views.stages)
        # What ends the longest stage bounds nothing: there is nowhere to go.
        last = max(bounds.values(), default=0)
        for instance in self.instances:
            end = bounds.get(instance.instance_id, last)
            instance.set_stage_end(NEVER if end >= last else end, now)

    def _job(self, request_id: str) -> Job:
        job = self._jobs_by_id.get(request_id)
        if job is None:
            raise SimulationError(f"the policy moves {request_id!r}, which does not exist")
        return job

    def _instance(self, instance_id: str) -> Instance:
        instance = self._by_id.get(instance_id)
        if instance is None:
            raise SimulationError(f"the policy names instance {instance_id!r}, which does not exist")
        return instance


def _in_order(requests: Sequence[SimRequest]) -> list[SimRequest]:
    return sorted(requests, key=lambda request: request.arrival_s)


def simulate(
    spec: ClusterSpec,
    requests: Sequence[SimRequest],
    policy: Policy,
    intra: IntraPolicy,
    *,
    seed: int = 0,
    sample_interval_s: float | None = None,
    progress: Callable[[float], None] | None = None,
    admission: TtftAdmission | None = None,
) -> SimResult:
    """Run all `requests` through the cluster and return what happened to them.

    Equal arguments give equal results; `seed` sets when the first report is due. `progress` is called now
    and then with the share of requests done. `admission`: which requests are refused as too late; None: none.
    Raises SimulationError if the policy names what does not exist,
    or leaves requests waiting for ever.
    """
    simulation = Simulation(
        spec, requests, policy, intra, seed=seed, sample_interval_s=sample_interval_s, admission=admission
    )
    with collector_paused():
        return simulation.run(progress)
