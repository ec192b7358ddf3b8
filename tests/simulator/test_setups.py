"""Setups: the configuration that belongs to a policy's name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simulator.cluster import ClusterSpec
from simulator.request import SimRequest
from simulator.setups import (
    FORMER,
    NoisyPredictor,
    OraclePredictor,
    UnknownSetupError,
    predictor_for,
    setup_for,
)
from simulator.simulation import SimulationError, simulate
from tailrace.actions import WhenFull
from tailrace.cluster import Pool
from tailrace.intra import registry as intra_registry
from tailrace.intra.earliest_due import EarliestDue
from tailrace.intra.orders import DecodeFirst, Fcfs, QuantumRoundRobin
from tailrace.intra.pascal import PascalQueue
from tailrace.policy import registry
from tailrace.policy.arrow.policy import Arrow
from tailrace.policy.cascade.llumnix import Llumnix
from tailrace.policy.deployment import Deployment
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.policy.parameters import ParameterError
from tailrace.slo import Slo
from tests.simulator.worlds import PROFILE
from tests.worker.orders import Mistaken

KNOWN = Deployment(profile=PROFILE)
SPEC = ClusterSpec.uniform(4, PROFILE)
# By former names, what to write.
FORMERLY = {**registry.FORMER, **FORMER}
REQUESTS = [SimRequest(f"r{n}", n * 0.02, 30 + n, (n % 2) * 40, 20 + n) for n in range(24)]


@pytest.mark.parametrize("name", [*registry.names(), *FORMERLY.values()])
def test_every_setup_serves_every_request(name: str) -> None:
    setup = setup_for(name)
    result = simulate(setup.apply(SPEC, 60.0), REQUESTS, setup.policy(KNOWN), setup.intra())
    assert all(record.finish_s is not None for record in result.requests)


@pytest.mark.parametrize(
    ("name", "intra", "when_full", "prefill"),
    [
        ("least_loaded+fcfs load=footprint", Fcfs, WhenFull.WAIT, None),
        ("least_loaded+round_robin load=footprint", QuantumRoundRobin, WhenFull.WAIT, None),
        ("pascal", PascalQueue, WhenFull.HOST, None),
        ("arrow", DecodeFirst, WhenFull.WAIT, 2),
        ("ares", Fcfs, WhenFull.WAIT, 1),
        ("cascade", Fcfs, WhenFull.REFUSE, None),
        ("cascade layout=chain", Fcfs, WhenFull.REFUSE, None),
        ("tailrace.policy.cascade.llumnix:Llumnix", Fcfs, WhenFull.WAIT, None),
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
    assert setup_for(name).migration.when_full is registry.choose(name).policy.when_full


@pytest.mark.parametrize(("former", "text"), FORMERLY.items())
def test_former_names_are_refused_with_what_to_write(former: str, text: str) -> None:
    with pytest.raises(UnknownSetupError, match=re.escape(f"no policy {former!r} any more; write {text!r}")):
        setup_for(former)


def test_a_class_takes_an_order_and_parameters() -> None:
    setup = setup_for("tailrace.policy.cascade.llumnix:Llumnix+earliest_due migrate_below=1 pass_over=0.5")
    policy, order = setup.policy(KNOWN), setup.intra(Slo(0.5, 0.03))
    assert isinstance(policy, Llumnix) and policy.migrate_below == 1.0
    assert isinstance(order, EarliestDue) and order.pass_over == 0.5


def test_nothing_moves_with_moves_off() -> None:
    requests = [SimRequest(f"r{n}", n * 0.02, 30 + n, (n % 2) * 40, 20 + n) for n in range(24)]

    def migrations(name: str) -> int:
        setup = setup_for(name)
        return len(simulate(setup.apply(SPEC, 60.0), requests, setup.policy(KNOWN), setup.intra()).migrations)

    for name in ("arrow", "static_pools", "pascal"):
        assert migrations(name) > 0
        assert migrations(f"{name} moves=false") == 0


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


def test_the_predictor_depends_on_the_parameters() -> None:
    assert setup_for("ares rescheduling=current_load").apply(SPEC).predictor is None
    assert isinstance(setup_for("ares predict=oracle").apply(SPEC).predictor, OraclePredictor)
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
        ("magic", "unknown policy 'magic'; installed: ares, "),
        ("least_loaded+magic", "unknown order 'magic'; known: decode_first, "),
        ("", "unknown policy ''"),
        ("ares predict=psychic", "unknown prediction 'psychic'"),
        ("no_such_module:Mine", "no_such_module"),
        ("tailrace.policy.pascal:Mine", "has no Mine"),
        ("tailrace.policy.pascal:NO_INSTANCE", "not a class derived from"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(UnknownSetupError, match=message):
        setup_for(name)


def test_a_policy_whose_module_fails_is_named_with_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "night_policy.py").write_text(
        "from tailrace.policy.least_loaded import LeastLoaded\n"
        "from tailrace.policy.parameters import parameter\n"
        "class Mine(LeastLoaded):\n"
        "    share: float = parameter(7.0, 'share', minimum=0, maximum=1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    wrong = r"cannot be loaded: ValueError: default 7\.0: a number from 0 to 1 \(night_policy\.py:4\)"
    with pytest.raises(UnknownSetupError, match=wrong):
        setup_for("night_policy:Mine")


def test_a_batch_order_with_a_mistake_ends_the_run_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        intra_registry, "INTRA_POLICIES", {**intra_registry.INTRA_POLICIES, "mistaken": Mistaken}
    )
    setup = setup_for("least_loaded+mistaken")
    with pytest.raises(SimulationError, match="order mistaken at rank: ZeroDivisionError: a mistake"):
        simulate(setup.apply(SPEC, 60.0), REQUESTS, setup.policy(KNOWN), setup.intra())


def test_unknown_predictors() -> None:
    with pytest.raises(UnknownSetupError, match="none, noisy, oracle"):
        predictor_for("psychic")


def test_parameters_reach_policy_order_and_pools() -> None:
    rr = setup_for("least_loaded+round_robin load=footprint").with_parameters(
        {"quantum_tokens": "7", "queued_weight": "0"}
    )
    order, policy = rr.intra(), rr.policy(KNOWN)
    assert isinstance(order, QuantumRoundRobin) and order.quantum_tokens == 7
    assert isinstance(policy, LeastLoaded) and policy.queued_weight == 0.0
    pascal = setup_for("pascal").with_parameters({"quantum_tokens": 200, "demotion_tokens": 900})
    queue = pascal.intra()
    assert isinstance(queue, PascalQueue)
    assert (queue.quantum_tokens, queue.demotion_tokens) == (200, 900)
    arrow = setup_for("arrow").with_parameters({"prefill_share": 0.25}).apply(SPEC)
    assert [i.pool for i in arrow.instances].count(Pool.PREFILL) == 1


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("session", {"quantum_tokens": 7}, "policy 'session' has no parameter 'quantum_tokens'"),
        ("cascade", {"watermark": 0.1}, "policy 'cascade' has no parameter 'watermark'"),
        ("ares", {"horizon_tokens": 10, "horizon_points": 20}, "horizon_points is 20"),
    ],
)
def test_invalid_parameters_are_errors(name: str, given: dict[str, int], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        setup_for(name).with_parameters(given)
