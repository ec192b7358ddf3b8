"""Run one simulation: events, instances, migrations and views, and a policy that decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from simulator.bidding import Bidding
from simulator.blocks import blocks_for
from simulator.cluster import ClusterSpec
from simulator.events import NEVER, EventQueue
from simulator.instance import Instance
from simulator.job import Job, JobState
from simulator.known_prefixes import KnownPrefixes
from simulator.metrics import CompletedJobs, Sampler
from simulator.migration import Migration, Migrations
from simulator.network import Network
from simulator.prefix_cache import make_prefix_cache
from simulator.prefix_pulls import PrefixPulls
from simulator.records import MigrationOutcome, PlacementRecord, SimResult
from simulator.reports import Report
from simulator.request import SimRequest
from simulator.views import Views
from tailrace.actions import (
    Action,
    CopyPrefix,
    Migrate,
    Offer,
    Place,
    Refuse,
    ReturnPrompts,
    SetPool,
    SetStages,
    WhenFull,
)
from tailrace.cluster import Arrival, Stage, length_bounds
from tailrace.collector import collector_paused
from tailrace.control.admission import TtftAdmission
from tailrace.control.guard import PlainCalls, PolicyFailed
from tailrace.control.runner import DecisionPoint, Moment, PolicyRunner
from tailrace.intra.base import IntraPolicy
from tailrace.policy.base import Policy
from tailrace.policy.registry import declared

# Consecutive policy ticks without any other pending event after which the simulation counts as stuck.
_IDLE_TICKS = 1_000
# Seconds without a request and without an action of the policy after which ticks and reports are skipped.
_QUIET_S = 600.0
# The same, in periods of the statistics that the policy gets: after two, they are those of an idle cluster.
_QUIET_PERIODS = 2.0


class SimulationError(Exception):
    """The simulation cannot continue: a policy named something that does not exist, or requests can never
    run."""


class _FixedPolicy:
    """A policy that stays the same for the whole simulation."""

    def __init__(self, policy: Policy, admission: TtftAdmission | None) -> None:
        self.policy = policy
        self.name = type(policy).__name__
        self.declared = declared(self.name, policy)
        self.admission = admission


class Simulation:
    """The state of one run."""

    def __init__(
        self,
        spec: ClusterSpec,
        requests: Sequence[SimRequest],
        policy: Policy,
        intra: IntraPolicy,
        *,
        seed: int,
        sample_interval_s: float | None,
        max_steps: int = NEVER,
        admission: TtftAdmission | None = None,
        quiet_s: float = _QUIET_S,
    ) -> None:
        """Set up the cluster. `max_steps` limits the steps that are simulated as one event; 1 simulates every
        step. `quiet_s`: after how many quiet seconds an idle cluster's ticks and reports are skipped."""
        self._spec = spec
        fixed = _FixedPolicy(policy, admission)
        self._declared = fixed.declared
        self._events = events = EventQueue()
        self.instances = [
            Instance(i, intra, events, self, max_steps, make_prefix_cache(i, requests))
            for i in spec.instances
        ]
        self._by_id = {instance.instance_id: instance for instance in self.instances}
        self.jobs = [Job(request, order) for order, request in enumerate(_in_order(requests))]
        self._jobs_by_id = {job.request.request_id: job for job in self.jobs}
        if len(self._jobs_by_id) != len(self.jobs):
            raise ValueError("request ids are not distinct")
        self._prefixes = KnownPrefixes(self.instances, self._jobs_by_id)
        self._views = Views(spec, self.instances, intra, self._prefixes)
        network = Network(spec.link, events)
        self.migrations = Migrations(spec.migration, self._by_id, events, network, self)
        self.pulls = PrefixPulls(network, events, spec.migration)
        self._runner = PolicyRunner(self._views, fixed, self, PlainCalls())
        self._sampler = Sampler(self.instances, spec.stages)
        self._sample_interval_s = sample_interval_s
        self.bidding = Bidding(
            self.instances,
            self._jobs_by_id,
            self.migrations,
            events,
            spec.migration.message_s,
            seed,
            # A request on offer counts as migrating, as in the live scheduler.
            offer_changed=self._views.mark_dirty,
        )
        self._request_ids = [request.request_id for request in requests]
        self._completed = CompletedJobs(spec.tpot_target_s)
        self._next = 0
        self._placements = 0
        self._idle_ticks = 0
        periods_s = (fixed.declared.lengths_period_s or 0.0, fixed.declared.prefixes_period_s or 0.0)
        self._quiet_s = max(quiet_s, *(_QUIET_PERIODS * period_s for period_s in periods_s))
        # When a request last arrived or ended, or the policy last acted.
        self._active_s = 0.0
        self._views.keep_lengths(fixed.declared.lengths_period_s, 0.0)
        self._views.hot.track(fixed.declared.prefixes_period_s)
        # The monitor's clock is independent of the workload's.
        self._report_offset_s = random.Random(seed).random() * max(0.0, spec.report.interval_s)
        self._set_stage_ends(0.0)

    def run(self, progress: Callable[[float], None] | None) -> SimResult:
        """Simulate until the last request ends. Raise SimulationError if that cannot happen."""
        self._start()
        events, total, completed = self._events, len(self.jobs), self._completed
        now = 0.0
        reported = 0
        while completed.count < total:
            if not events:
                raise SimulationError(f"{total - completed.count} requests can never run")
            now = events.step()
            if progress is not None and (completed.count - reported) * 200 >= total:
                reported = completed.count
                progress(reported / total)
        if progress is not None:
            progress(1.0)
        records = completed.records()
        return SimResult(
            requests=[records[request_id] for request_id in self._request_ids],
            migrations=self.migrations.records,
            pulls=self.pulls.records,
            series=self._sampler.series(),
            events_processed=events.processed,
            end_s=now,
        )

    # ---- Listener (simulator/instance.py)

    def prefill_done(self, instance: Instance, job: Job, now: float) -> None:
        """Let the policy choose where to decode."""
        self._publish_phase(instance, job, DecisionPoint.PREFILL_DONE, now)

    def reasoning_ended(self, instance: Instance, job: Job, now: float) -> None:
        """Let the policy choose where to answer."""
        self._publish_phase(instance, job, DecisionPoint.REASONING_ENDED, now)

    def stage_outgrown(self, instance: Instance, job: Job, now: float) -> None:
        """Let the policy move a request that has outgrown its stage."""
        self._publish_phase(instance, job, DecisionPoint.LENGTH_BOUNDARY, now)

    def finished(self, instance: Instance, job: Job, now: float) -> None:
        """Record the end of a request."""
        self.migrations.finished(job, now)
        self.bidding.finished(job, now)
        self._views.request_left(job, instance)
        self._views.count_finish(job.prompt, job.total, now)
        self._complete(job)

    def preempted(self, instance: Instance, job: Job, now: float) -> None:
        """Close the migration of a preempted request, if its KV is lost."""
        self.migrations.preempted(job, now)

    # ---- MigrationListener (simulator/migration.py)

    def migration_opened(self, migration: Migration) -> None:
        """Count the migration at once, as the live scheduler does."""
        self._views.migration_opened(migration)

    def migration_closed(self, migration: Migration, outcome: MigrationOutcome) -> None:
        """Add the request to the target's counts, or remove the migration from them."""
        if outcome is MigrationOutcome.COMMITTED:
            self._views.migration_committed(migration)
        else:
            self._views.migration_aborted(migration)

    # ---- events

    def _start(self) -> None:
        events = self._events
        if self.jobs:
            events.schedule(self.jobs[0].request.arrival_s, self._arrive)
        if self._spec.report.interval_s > 0.0:
            events.schedule_background(self._report_offset_s, self._report)
        if self._declared.tick_interval_s is not None:
            events.schedule_background(self._declared.tick_interval_s, self._tick)
        if self._sample_interval_s is not None:
            events.schedule_background(0.0, self._sample)

    def _arrive(self, now: float) -> None:
        job = self.jobs[self._next]
        self._next += 1
        self._active_s = now
        if self._next < len(self.jobs):
            self._events.schedule(self.jobs[self._next].request.arrival_s, self._arrive)
        arrival = self._arrival(job, now)
        self._placements += 1
        placement = self._runner.place(arrival, Moment(now, now))
        if isinstance(placement, Refuse):
            self._refuse(job, placement.reason)
            return
        instance = self._instance(placement.instance_id)
        refusal = self._length_refusal(job, instance)
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
            block_tokens=request.unit_tokens,
            session_id=request.session_id,
        )

    def _length_refusal(self, job: Job, instance: Instance) -> str:
        """Return why the instance could never run the job, or "" if it could."""
        longest = min(instance.total_blocks * instance.block_tokens, instance.spec.max_model_len)
        tokens = job.prompt + job.total
        if tokens <= longest and blocks_for(tokens, instance.block_tokens) <= instance.total_blocks:
            return ""
        return f"{tokens} tokens: longer than {instance.instance_id} can hold"

    def _submit(self, job: Job, instance: Instance, placement: Place, arrival: Arrival, now: float) -> None:
        job.expected_cached = arrival.found_tokens(instance.instance_id, placement.pull_from)
        self._prefixes.record_placement(instance, arrival.block_names, now)
        self._views.hot.arrived(arrival, now)
        job.placements.append(PlacementRecord(now, instance.instance_id))
        self._views.request_placed(job, instance)
        self._carry_out(placement.also, now)
        holder = self._instance(placement.pull_from) if placement.pull_from else None
        self.pulls.submit(job, instance, holder, now)

    def _refuse(self, job: Job, reason: str) -> None:
        job.refused = reason
        job.state = JobState.DONE
        self._complete(job)

    def _complete(self, job: Job) -> None:
        self._completed.add(job)
        self._active_s = self._events.now

    def _publish_phase(self, instance: Instance, job: Job, point: DecisionPoint, now: float) -> None:
        tokens = job.tokens_at(instance.boundary)
        request = None
        if self._runner.has_handler(point):
            interval_s = instance.token_interval_s(now)
            request = self._views.request_view(job, instance, tokens, JobState.DECODING, -1, interval_s, now)

        def deliver(later: float) -> None:
            if job.state is JobState.DONE:
                return
            self._views.phase_entered(job, instance, tokens)
            if request is not None:
                self._runner.request_changed(point, request, Moment(later, later))

        self._events.schedule(now + self._spec.report.delay_s, deliver)

    def _report(self, now: float) -> None:
        reports = self._views.capture(now)
        self._events.schedule_background(now + self._spec.report.delay_s, self._publisher(reports))
        next_s = now + self._spec.report.interval_s
        # A report that arrives after the next request did counts as one from before it.
        for later_s in self._skipped(now, next_s, self._spec.report.interval_s, self._spec.report.delay_s):
            next_s = later_s
        self._events.schedule_background(next_s, self._report)

    def _skipped(self, now: float, next_s: float, interval_s: float, delay_s: float) -> Iterator[float]:
        """Yield the times to which a periodic event may be put off, one period after the other.

        Nothing if the cluster is not quiet. The view of an idle cluster stays the same, its reports change
        nothing, and a policy is pure: what it has not done in `_quiet_s`, it will do only because of the time
        itself. The last event that takes effect before the next arrival is not skipped: only one whose
        successor takes effect before it, too. Adding the period each time yields the same times, to the last
        digit, as without skipping.
        """
        if not self._idle() or now - self._active_s < self._quiet_s:
            return
        arrival_s = self.jobs[self._next].request.arrival_s
        while (later_s := next_s + interval_s) + delay_s < arrival_s:
            yield later_s
            next_s = later_s

    def _idle(self) -> bool:
        """Return whether there are no requests, and nothing happens before the next one arrives."""
        return self._events.foreground == 1 and self._completed.count == self._next < len(self.jobs)

    def _publisher(self, reports: Sequence[Report]) -> Callable[[float], None]:
        return lambda _: self._views.publish(reports)

    def _tick(self, now: float) -> None:
        interval_s = self._declared.tick_interval_s
        assert interval_s is not None
        self._idle_ticks = 0 if self._events.foreground else self._idle_ticks + 1
        if self._idle_ticks > _IDLE_TICKS:
            raise SimulationError(f"{len(self.jobs) - self._completed.count} requests can never run")
        self._runner.tick(Moment(now, now))
        next_s = now + interval_s
        for later_s in self._skipped(now, next_s, interval_s, 0.0):
            self._runner.last_tick_s = next_s
            # Part of a tick, and it remembers when it was last called.
            self._views.lengths(next_s)
            next_s = later_s
        self._events.schedule_background(next_s, self._tick)

    def _sample(self, now: float) -> None:
        assert self._sample_interval_s is not None
        self._sampler.sample(now)
        self._events.schedule_background(now + self._sample_interval_s, self._sample)

    # ---- the policy

    def submit(self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE) -> None:
        """Carry out the policy's decisions now. The cluster spec, not `when_full`, says what a full target
        does."""
        self._active_s = self._events.now
        self._carry_out(actions, self._events.now)

    def _carry_out(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            match action:
                case Migrate():
                    job = self._job(action.request_id)
                    self.migrations.request(action, job, self._instance(action.target_id), now)
                case Offer():
                    for name in action.receiver_ids:
                        self._instance(name)
                    self.bidding.offer(action, self._job(action.request_id), now)
                case ReturnPrompts():
                    self._return(action, now)
                case CopyPrefix():
                    self._copy_prefix(action, now)
                case SetPool():
                    instance = self._instance(action.instance_id)
                    instance.pool = action.pool
                    self._views.mark_dirty(instance)
                    self._sampler.pool_changed(instance, now)
                case SetStages():
                    self._set_stages(action.stages, now)

    def _return(self, action: ReturnPrompts, now: float) -> None:
        """Place prompts again after three messages: the order to the instance, its reply to the front end and
        the front end's placement request."""
        source = self._instance(action.instance_id)
        jobs = [self._job(request_id) for request_id in action.request_ids]

        def place(later: float) -> None:
            for job in jobs:
                if source.waits(job):
                    self._place_elsewhere(job, source, later)

        self._events.schedule(now + 3 * self._spec.migration.message_s, place)

    def _copy_prefix(self, action: CopyPrefix, now: float) -> None:
        hot, target = self._views.hot, self._instance(action.target_id)
        if hot.may_copy(action, now):
            hot.add_copy(action, now)
            self.pulls.copy(
                self._job(action.request_id).request,
                self._instance(action.holder_id),
                target,
                action.tokens,
                now,
                lambda later: hot.end_copy(target.instance_id, later),
            )

    def _place_elsewhere(self, job: Job, source: Instance, now: float) -> None:
        arrival = replace(self._arrival(job, now), excluded=frozenset({source.instance_id}), admitted=True)
        self._placements += 1
        placement = self._runner.place(arrival, Moment(now, now))
        if isinstance(placement, Refuse):
            return
        target = self._instance(placement.instance_id)
        if self._length_refusal(job, target):
            return
        source.withdraw(job, now)
        self._views.request_left(job, source)
        self._submit(job, target, placement, arrival, now)

    def _set_stages(self, stages: tuple[Stage, ...], now: float) -> None:
        if stages == self._views.stages:
            return
        self._views.set_stages(stages)
        self._sampler.stages_changed(stages, now)
        self._set_stage_ends(now)

    def _set_stage_ends(self, now: float) -> None:
        bounds = length_bounds(self._views.stages)
        # The upper bound of the last stage limits nothing: no stage takes longer requests.
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

    Equal arguments give equal results; `seed` determines when the first report is due. `progress` is called
    occasionally with the share of requests done. `admission` refuses requests whose predicted TTFT is too
    late; None refuses none. Raise SimulationError if the policy raises, answers something else than it was
    asked for, names something that does not exist, or leaves requests waiting forever.
    """
    simulation = Simulation(
        spec, requests, policy, intra, seed=seed, sample_interval_s=sample_interval_s, admission=admission
    )
    with collector_paused():
        try:
            return simulation.run(progress)
        except PolicyFailed as error:
            raise SimulationError(str(error)) from error
