"""A simulated fleet that follows the desired number of instances."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from experiments.desired_instances.following import SAMPLE_S, Following
from experiments.desired_instances.measure import BINS, TRACE, Settings, day, run
from experiments.desired_instances.plot import plot
from simulator.cluster import ClusterSpec
from simulator.request import SimRequest
from simulator.setups import setup_for
from simulator.simulation import simulate
from tailrace.perf.measured import Measured
from tailrace.policy.deployment import Deployment
from tailrace.profiles import load_profile
from tailrace.scaling import Scaling

PROFILE = "llama-3.1-70b-tp2-h20"
STARTUP_S = 30.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Twelve minutes; the first half of the trace has three times the rate of the second."""
    (tmp_path / TRACE).parent.mkdir(parents=True)
    times = [*range(45), *range(45, 90, 3)]
    rows = [f"2023-11-16 18:{at // 60:02}:{at % 60:02}.0000000,{1_000 + at},{100 + at}" for at in times]
    (tmp_path / TRACE).write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    return Settings(tmp_path, PROFILE, "least_loaded", 1.5, 0.2, STARTUP_S, 5.0, 0.15, 1, 6)


def test_a_day_has_the_recorded_shape_and_lengths(settings: Settings) -> None:
    requests = day(settings)
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    assert len({r.request_id for r in requests}) == len(requests)
    assert {r.answer_tokens - r.prompt_tokens for r in requests} == {-900}
    assert len(requests) == pytest.approx(1.5 * settings.day_s, rel=0.1)
    early = sum(r.arrival_s < settings.day_s / 2 for r in requests)
    assert early == pytest.approx(0.75 * len(requests), rel=0.1)


def test_a_fleet_that_follows_serves_every_request_and_is_drawn(settings: Settings) -> None:
    outcome = run(settings, None)
    assert outcome.requests == len(day(settings))
    assert 0.8 < outcome.attainment <= 1.0
    assert outcome.instance_hours < settings.most * settings.hours
    assert len(outcome.rates) == len(outcome.met) == BINS
    assert all(sample.active <= sample.paid <= settings.most for sample in outcome.samples)
    ElementTree.fromstring(plot(outcome.rates, outcome.samples, {"follows": outcome.met}, settings.day_s))
    assert run(settings, 2).instance_hours == 2 * settings.hours


def test_an_instance_takes_its_time_to_come_and_is_empty_when_it_goes(settings: Settings) -> None:
    profile = load_profile(PROFILE)
    setup = setup_for("least_loaded")
    scaling = Scaling(cooldown_s=20.0, most=6)
    policy = Following(
        setup.policy(Deployment(settings.slo, profile)),
        scaling,
        settings.slo,
        STARTUP_S,
        ["i000"],
        Measured.of_profile(profile, 2_048),
    )
    # A minute of more than one instance serves, and then streams that last.
    requests = [SimRequest(f"r{n}", 100.0 + n / 3.0, 1_000, 0, 300) for n in range(180)]
    requests += [replace(r, request_id=f"long{n}", answer_tokens=12_000) for n, r in enumerate(requests[::6])]
    result = simulate(
        setup.apply(ClusterSpec.uniform(6, profile)),
        [*requests, SimRequest("last", 900.0, 10, 0, 10)],
        policy,
        setup.intra(settings.slo),
        seed=1,
    )
    grown = next(s.at_s for s in policy.samples if s.desired > 1)
    ready = next(s.at_s for s in policy.samples if s.active > 1)
    assert STARTUP_S <= ready - grown <= STARTUP_S + 20.0
    others = [r.placements[0].at_s for r in result.requests if r.placements[0].instance_id != "i000"]
    assert min(others) >= ready - SAMPLE_S
    assert max(s.active for s in policy.samples) > 1 and policy.samples[-1].paid == 1
    # What ran on those that went has moved.
    assert {r.instance_id for r in result.requests if r.request_id == "last"} == {"i000"}
    assert any(r.migrations for r in result.requests)
    assert all(r.finish_s is not None for r in result.requests)
