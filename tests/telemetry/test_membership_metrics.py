"""Metrics of the membership."""

from prometheus_client import CollectorRegistry, generate_latest

from tailrace.cluster import Pool
from tailrace.model_identity import ModelIdentity
from tailrace.records import InstanceRecord, ServiceRecord
from tailrace.rollout.record import RolloutRecord, RolloutState
from tailrace.telemetry.membership import MembershipMetrics
from tests.static_members import StaticMembers


def _instance(name: str) -> InstanceRecord:
    return InstanceRecord(
        instance_id=name,
        incarnation="1",
        address="h:1",
        stream_address="h:1",
        engine="simulated",
        model="m",
        model_fingerprint="f",
        model_identity=ModelIdentity("t", "w"),
        block_tokens=16,
        kv_blocks_total=8,
        max_model_len=64,
        max_num_seqs=2,
        kv_bytes_per_token=1,
        started_s=0.0,
    )


def test_members_are_counted_by_pool_kind_and_state() -> None:
    service = ServiceRecord(kind="monitor", service_id="m", incarnation="1", address="h:2")
    draining = RolloutRecord(model="m", before="t:a", new="t:b", state=RolloutState.DRAINING, begun_s=1.0)
    members = StaticMembers(
        instances={name: _instance(name) for name in "abc"},
        services={("monitor", "m"): service},
        # Pools and drains of missing instances do not count.
        pools={"a": Pool.PREFILL, "b": Pool.DECODE, "gone": Pool.DECODE},
        draining=frozenset({"b", "gone"}),
        suspects=frozenset({"c"}),
        rollouts={"m": draining},
    )
    registry = CollectorRegistry()
    registry.register(MembershipMetrics(members))
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'tailrace_cluster_pool_instances{pool="prefill"} 1.0',
        'tailrace_cluster_pool_instances{pool="decode"} 1.0',
        'tailrace_cluster_pool_instances{pool="decode_to_prefill"} 0.0',
        'tailrace_cluster_pool_instances{pool="none"} 1.0',
        'tailrace_cluster_services{kind="monitor"} 1.0',
        "tailrace_cluster_instances 3.0",
        "tailrace_cluster_draining_instances 1.0",
        "tailrace_cluster_suspect_instances 1.0",
        'tailrace_cluster_rollouts{state="draining"} 1.0',
        'tailrace_cluster_rollouts{state="done"} 0.0',
    ):
        assert line in lines
