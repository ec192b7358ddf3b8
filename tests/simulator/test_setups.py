"""Setups: the configuration that belongs to a policy's name."""

from __future__ import annotations

import pytest

from simulator.cluster import ClusterSpec
from simulator.request import SimRequest
from simulator.setups import (
    NoisyPredictor,
    OraclePredictor,
    UnknownSetupError,
    predictor_for,
    setup_for,
    setup_names,
)
from simulator.simulation import simulate
from tailrace.actions import WhenFull
from tailrace.cluster import Pool
from tailrace.intra.orders import DecodeFirst, Fcfs, QuantumRoundRobin
from tailrace.intra.pascal import PascalQueue
from tailrace.policy import registry
from tailrace.policy.arrow.policy import Arrow
from tailrace.policy.deployment import Deployment
from tailrace.policy.parameters import ParameterError
from tailrace.policy.pascal import MinKv
from tailrace.slo import Slo
from tests.simulator.worlds import PROFILE

KNOWN = Deployment(profile=PROFILE)
SPEC = ClusterSpec.uniform(4, PROFILE)
REQUESTS = [SimRequest(f"r{n}", n * 0.02, 30 + n, (n % 2) * 40, 20 + n) for n in range(24)]


def test_every_policy_has_a_setup() -> None:
    assert set(registry.names()) < set(setup_names())


@pytest.mark.parametrize("name", setup_names())
def test_every_setup_serves_every_request(name: str) -> None:
    setup = setup_for(name)
    result = simulate(setup.apply(SPEC, 60.0), REQUESTS, setup.policy(KNOWN), setup.intra())
    assert all(record.finish_s is not None for record in result.requests)


@pytest.mark.parametrize(
    ("name", "intra", "when_full", "prefill"),
    [
        ("fcfs", Fcfs, WhenFull.HOST, None),
        ("rr", QuantumRoundRobin, WhenFull.HOST, None),
        ("pascal", PascalQueue, WhenFull.HOST, None),
        ("arrow", DecodeFirst, WhenFull.WAIT, 2),
        ("ares", Fcfs, WhenFull.WAIT, 1),
        ("cascade", Fcfs, WhenFull.REFUSE, None),
        ("cascade_chain", Fcfs, WhenFull.REFUSE, None),
        ("llumnix", Fcfs, WhenFull.WAIT, None),
    ],
)
def test_setups_match_the_papers(name: str, intra: type, when_full: WhenFull, prefill: int | None) -> None:
    setup = setup_for(name)
    spec = setup.apply(SPEC)
    assert type(setup.intra()) is intra
    assert spec.migration.when_full is when_full
    pools = [instance.pool for instance in spec.instances]
    if prefill is None:
        assert pools == [None] * 4
    else:
        assert pools == [Pool.PREFILL] * prefill + [Pool.DECODE] * (4 - prefill)


@pytest.mark.parametrize("name", registry.names())
def test_full_targets_behave_as_the_policy_declares(name: str) -> None:
    """The live scheduler uses the declaration of the class."""
    assert setup_for(name).migration.when_full is registry.policy_class(name).when_full


def test_baselines_of_pascal_are_placed_by_least_kv() -> None:
    for name in ("fcfs", "rr"):
        assert isinstance(setup_for(name).policy(KNOWN), MinKv)


def test_policies_get_the_slos() -> None:
    arrow = setup_for("arrow").policy(Deployment(Slo(0.5, 0.03), PROFILE))
    assert isinstance(arrow, Arrow)
    assert (arrow.ttft_slo_s, arrow.tpot_slo_s) == (0.5, 0.03)


def test_one_instance_has_no_pools() -> None:
    assert setup_for("arrow").apply(ClusterSpec.uniform(1, PROFILE)).instances[0].pool is None


def test_pool_sizes_apply_only_to_setups_with_pools() -> None:
    pools = [i.pool for i in setup_for("arrow").with_pools(3, 4).apply(SPEC).instances]
    assert pools.count(Pool.PREFILL) == 3
    assert setup_for("pascal").with_pools(3, 4) == setup_for("pascal")


def test_the_predictor_depends_on_the_variant() -> None:
    assert setup_for("ares_no_prediction").apply(SPEC).predictor is None
    assert isinstance(setup_for("ares_oracle").apply(SPEC).predictor, OraclePredictor)
    ares = setup_for("ares").apply(SPEC)
    assert ares.predictor == NoisyPredictor()
    assert ares.future_load is not None


def test_the_error_of_the_predictor_scales_with_the_workload() -> None:
    small, paper = predictor_for("noisy", 754.2), NoisyPredictor()
    assert isinstance(small, NoisyPredictor)
    assert small.mean_output == 754.2
    for name in ("fade", "spread", "hold"):
        assert getattr(small, name) == pytest.approx(getattr(paper, name) / 10)


def test_a_custom_policy_class() -> None:
    setup = setup_for("tailrace.policy.arrow.policy:Arrow")
    assert isinstance(setup.policy(KNOWN), Arrow)
    # Its declarations apply under any name.
    assert isinstance(setup.intra(), DecodeFirst)
    assert setup.prefill_share == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("magic", "unknown policy 'magic'; known: ares, "),
        ("no_such_module:Mine", "no_such_module"),
        ("tailrace.policy.pascal:Mine", "has no Mine"),
        ("tailrace.policy.pascal:NO_INSTANCE", "not a class derived from"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(UnknownSetupError, match=message):
        setup_for(name)


def test_unknown_predictors() -> None:
    with pytest.raises(UnknownSetupError, match="none, noisy, oracle"):
        predictor_for("psychic")


def test_parameters_reach_policy_order_and_pools() -> None:
    rr = setup_for("rr").with_parameters({"quantum_tokens": "7", "queued_weight": "0"})
    order, policy = rr.intra(), rr.policy(KNOWN)
    assert isinstance(order, QuantumRoundRobin) and order.quantum_tokens == 7
    assert isinstance(policy, MinKv) and policy.queued_weight == 0.0
    pascal = setup_for("pascal").with_parameters({"quantum_tokens": 200, "demotion_tokens": 900})
    queue = pascal.intra()
    assert isinstance(queue, PascalQueue)
    assert (queue.quantum_tokens, queue.demotion_tokens) == (200, 900)
    arrow = setup_for("arrow").with_parameters({"prefill_share": 0.25}).apply(SPEC)
    assert [i.pool for i in arrow.instances].count(Pool.PREFILL) == 1


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("fcfs", {"quantum_tokens": 7}, "policy 'fcfs' has no parameter 'quantum_tokens'"),
        ("cascade", {"watermark": 0.1}, "policy 'cascade' has no parameter 'watermark'"),
        ("ares", {"horizon_tokens": 10, "horizon_points": 20}, "20 points in 10 steps"),
    ],
)
def test_invalid_parameters_are_errors(name: str, given: dict[str, int], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        setup_for(name).with_parameters(given)
