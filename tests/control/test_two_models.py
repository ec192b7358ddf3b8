"""The simulator's cluster model, which counts lazily, and the live one agree.

Every simulation here updates both: the simulator's as usual, the live one with the messages that workers
would send. The views of policies are then compared. docs/record-replay.md lists intended differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator.simulation
from simulator.cluster import ClusterSpec, MigrationSpec, ReportSpec
from simulator.instance import Instance
from simulator.job import Job, JobState
from simulator.migration import Migration
from simulator.reports import Report, blocks_of
from simulator.request import SimRequest
from simulator.simulation import simulate
from simulator.views import Views
from tailrace.actions import WhenFull
from tailrace.cluster import Arrival, ClusterView, InstanceView, Phase, RequestState
from tailrace.control.events import MigrationClosed, MigrationOpened
from tailrace.control.hot_prefixes import PrefixSource
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.intra.base import IntraPolicy
from tailrace.messages import PHASE_NUMBERS, REQUEST_STATE_NUMBERS
from tailrace.policy.requests import RequestTable, table_of
from tailrace.records import InstanceRecord
from tailrace.request_columns import columns_from
from tailrace.v1 import monitor_pb2, types_pb2
from tests.scheduler.facts import instance, report_to, set_members
from tests.simulator.moving import MoveEverything
from tests.simulator.worlds import INTRA, PROFILE, workloads
from tests.static_members import StaticMembers

BLOCK = 8
# Steps take at least 7 ms, so that a request generates at most this many tokens between two reports.
INTERVAL_S, MOST_TOKENS = 0.05, 8

_STATES = {
    JobState.QUEUED: RequestState.WAITING,
    JobState.SWAPPED: RequestState.PREEMPTED,
    JobState.PREFILLING: RequestState.RUNNING,
    JobState.DECODING: RequestState.RUNNING,
    JobState.PAUSED: RequestState.PAUSED,
}


class Mirrored(Views):
    """Forward every update to a live model at the same time."""

    def __init__(
        self,
        spec: ClusterSpec,
        instances: Sequence[Instance],
        intra: IntraPolicy,
        prefixes: PrefixSource,
    ) -> None:
        super().__init__(spec, instances, intra, prefixes)
        self.live = ReportedCluster()
        records = {each.instance_id: _record(each) for each in instances}
        set_members(self.live, StaticMembers(instances=records), 0.0)

    # ---- updates

    def publish(self, reports: Sequence[Report]) -> None:
        super().publish(reports)
        for name, report in zip(self._known, reports, strict=True):
            report_to(self.live, self._message(name, report), 0.0)

    def request_placed(self, job: Job, instance: Instance) -> None:
        super().request_placed(job, instance)
        arrival = Arrival(job.request.request_id, job.prompt, self._spec.max_tokens, 0)
        self.live.place(arrival, instance.instance_id, 0.0)

    def phase_entered(self, job: Job, instance: Instance, tokens: int) -> None:
        super().phase_entered(job, instance, tokens)
        if job.instance_id == instance.instance_id:
            self._send_event(job, instance.instance_id, tokens, PHASE_NUMBERS[job.phase_of(tokens)])

    def request_left(self, job: Job, instance: Instance) -> None:
        super().request_left(job, instance)
        self._send_event(job, instance.instance_id, job.tokens, types_pb2.PHASE_UNSPECIFIED)

    def migration_opened(self, migration: Migration) -> None:
        super().migration_opened(migration)
        found = self.live.request(migration.job.request.request_id)
        assert found is not None
        at_request = replace(found, output_tokens=migration.requested_tokens - found.prompt_tokens)
        assert self.live.order(MigrationOpened(at_request, migration.target.instance_id))

    def migration_aborted(self, migration: Migration) -> None:
        super().migration_aborted(migration)
        self.live.apply(MigrationClosed(migration.job.request.request_id))

    def migration_committed(self, migration: Migration) -> None:
        super().migration_committed(migration)
        job = migration.job
        self._send_event(
            job, migration.target.instance_id, job.tokens, PHASE_NUMBERS[job.phase_of(job.tokens)]
        )
        self.live.apply(MigrationClosed(job.request.request_id))

    def _message(self, name: str, report: Report) -> monitor_pb2.WorkerReport:
        report.read_counts()
        rows = [row for row in report.rows if row[0].state is not JobState.DONE]
        return monitor_pb2.WorkerReport(
            instance_id=name,
            incarnation="1",
            load=monitor_pb2.InstanceLoad(
                running=report.running,
                waiting=report.waiting,
                kv_blocks_used=report.kv_used // BLOCK,
                kv_blocks_total=self._known[name].instance.total_blocks,
                block_tokens=BLOCK,
                prefill_backlog_tokens=report.backlog,
                context_tokens=report.context,
                migrations_in=self._known[name].instance.migrations_in,
            ),
            requests=columns_from(
                monitor_pb2.RequestReport(
                    request_id=job.request.request_id,
                    epoch=job.migrations,
                    phase=PHASE_NUMBERS[job.phase_of(tokens)],
                    state=REQUEST_STATE_NUMBERS[_STATES[state]],
                    prompt_tokens=job.prompt,
                    output_tokens=tokens,
                    phase_tokens=_phase_tokens(job, tokens),
                    max_tokens=self._spec.max_tokens,
                    kv_blocks=blocks_of((job, tokens, state, blocks), BLOCK),
                )
                for job, tokens, state, blocks in rows
            ),
        )

    def _send_event(self, job: Job, name: str, tokens: int, phase: types_pb2.Phase.ValueType) -> None:
        event = monitor_pb2.PhaseEvent(
            request_id=job.request.request_id,
            epoch=job.migrations,
            phase=phase,
            prompt_tokens=job.prompt,
            output_tokens=tokens,
            phase_tokens=_phase_tokens(job, tokens),
            max_tokens=self._spec.max_tokens,
        )
        report_to(
            self.live, monitor_pb2.WorkerReport(instance_id=name, incarnation="1", phase_events=[event]), 0.0
        )

    # ---- views

    def view_at(self, now_s: float) -> ClusterView:
        view, live = super().view_at(now_s), self.live.view()
        for name, simulated in view.instances.items():
            _compare_requests(simulated, live.instances[name])
            _compare_counts(simulated, live.instances[name], bool(self._known[name].coming))
            _compare_phases(simulated, live.instances[name], self._demotes)
        return view


def _compare_requests(simulated: InstanceView, live: InstanceView) -> None:
    there = {r.request_id: (r.phase, r.prompt_tokens, r.migrating) for r in simulated.requests}
    assert {r.request_id: (r.phase, r.prompt_tokens, r.migrating) for r in live.requests} == there
    assert live.prefill_backlog_tokens == simulated.prefill_backlog_tokens
    assert live.coming_tokens == simulated.coming_tokens
    assert live.kv_capacity_tokens == simulated.kv_capacity_tokens
    # A report can include a finished migration; new orders count immediately.
    assert live.migrations_in >= simulated.migrations_in


def _compare_counts(simulated: InstanceView, live: InstanceView, coming: bool) -> None:
    """Compare counts; `coming` says whether incoming migrations are open."""
    assert (simulated.running, simulated.waiting) == (live.running, live.waiting)
    assert simulated.context_tokens == live.context_tokens
    # The live model does not know which reservations a report includes.
    if not coming:
        assert simulated.kv_used_tokens == min(live.kv_used_tokens, live.kv_capacity_tokens)


def _compare_phases(simulated: InstanceView, live: InstanceView, demotes: bool) -> None:
    """Compare phase counts; `demotes` says whether the batch order demotes requests, which messages omit."""
    counted = table_of(simulated.requests).phase_load()
    reasoning, fresh, least_slack, _ = astuple(RequestTable(tuple(simulated.requests)).phase_load())
    assert (counted.reasoning, counted.fresh_answering) == (reasoning, fresh)
    assert counted.least_pacer_slack_tokens == pytest.approx(least_slack)
    if not demotes:
        there = table_of(live.requests).phase_load()
        assert (there.reasoning, there.fresh_answering) == (reasoning, fresh)
    wait = [r.prompt_tokens for r in simulated.requests if r.phase is Phase.PREFILL]
    for view in (simulated, live):
        assert sorted(tokens for _, tokens in table_of(view.requests).prompts()) == sorted(wait)


def _phase_tokens(job: Job, tokens: int) -> int:
    return tokens - job.reasoning if job.phase_of(tokens) is Phase.ANSWERING else tokens


def _record(simulated: Instance) -> InstanceRecord:
    return msgspec.structs.replace(
        instance(simulated.instance_id),
        block_tokens=BLOCK,
        kv_blocks_total=simulated.total_blocks,
        max_model_len=simulated.spec.max_model_len,
    )


@settings(max_examples=40, deadline=None)
@given(requests=workloads(most=12, span_s=1.0), intra=st.sampled_from(sorted(INTRA)))
def test_both_models_give_policies_the_same_views(requests: list[SimRequest], intra: str) -> None:
    spec = ClusterSpec.uniform(
        3, PROFILE, kv_capacity_tokens=330, block_tokens=BLOCK, max_num_seqs=6, chunk_budget_tokens=64
    )
    spec = replace(
        spec,
        migration=MigrationSpec(when_full=WhenFull.REFUSE, limit=2, patience_s=0.5),
        # Without delay: the comparison is of the known state, not of its age.
        report=ReportSpec(interval_s=INTERVAL_S, delay_s=0.0),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator.simulation, "Views", Mirrored)
        simulate(spec, requests, MoveEverything(), INTRA[intra])
