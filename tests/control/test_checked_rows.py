"""Only rows that may have changed are checked with a report; the model is the same as if all were."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailrace.cluster import Arrival
from tailrace.control.events import Input, Reported
from tailrace.control.reported_cluster import PhaseChange, ReportedCluster
from tailrace.v1 import monitor_pb2, types_pb2
from tests.scheduler.facts import GONE, event, members, report_to, request, set_members, steady

# Few, so that the same row is often reported again.
INSTANCES = ("a", "b")
NAMES = ("r", "s")
PHASES = (types_pb2.PHASE_PREFILL, types_pb2.PHASE_REASONING, types_pb2.PHASE_ANSWERING)

instances = st.sampled_from(INSTANCES)
names = st.sampled_from(NAMES)


@dataclass(frozen=True)
class Placed:
    """A placement of a request on an instance."""

    instance_id: str
    request_id: str


@dataclass(frozen=True)
class Absent:
    """An instance that leaves the cluster and comes back with the next step."""

    instance_id: str


requests = st.builds(
    request, names, st.sampled_from(PHASES[1:]), epoch=st.integers(0, 1), output_tokens=st.just(2)
)
reports = st.builds(
    steady, instances, st.lists(requests, max_size=4, unique_by=lambda reported: reported.request_id)
)
events = st.builds(
    event,
    instances,
    names,
    st.sampled_from([*PHASES, GONE]),
    epoch=st.integers(0, 1),
    output_tokens=st.just(2),
)
steps = st.lists(
    reports | events | st.builds(Placed, instances, names) | st.builds(Absent, instances),
    min_size=4,
    max_size=16,
)


class CheckingAll(ReportedCluster):
    """Checks every row of each report."""

    def apply(self, event: Input) -> list[PhaseChange]:
        """Apply an event."""
        if isinstance(event, Reported) and (tracked := self.tracked(event.report.instance_id)) is not None:
            for request_id in event.report.requests.request_ids:
                tracked.unsettle(request_id)
        return super().apply(event)


def run(model: ReportedCluster, number: int, step: object) -> object:
    """Let something happen to the model; return what it says about it."""
    now_s = number * 0.4
    set_members(model, members(*INSTANCES), now_s)
    match step:
        case Placed(instance_id, request_id):
            model.place(Arrival(request_id, 100, 1_000, number), instance_id, now_s)
        case Absent(instance_id):
            set_members(model, members(*[name for name in INSTANCES if name != instance_id]), now_s)
        case monitor_pb2.WorkerReport():
            return report_to(model, step, now_s)
    return None


ON_A = steady("a", [request("r")])


@example([ON_A, Placed("b", "r"), event("b", "r", GONE), ON_A])
@example([ON_A, Placed("a", "r"), ON_A])
@settings(max_examples=500)
@given(steps)
def test_the_model_is_the_same_as_if_all_rows_were_checked(steps: list[object]) -> None:
    model, checking = ReportedCluster(), CheckingAll()
    for one in (model, checking):
        one.keep_lengths(60.0, 0.0)
    for number, step in enumerate(steps):
        assert run(model, number, step) == run(checking, number, step)
    assert list(model.requests()) == list(checking.requests())
    assert model.state() == checking.state()
