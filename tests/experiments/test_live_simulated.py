"""Live against simulated, small: nothing is lost, and both sides tell of the same requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from experiments.live.simulated import tries
from experiments.live.simulated.compare import Row, compare
from experiments.live.simulated.figures import Counts, Spread
from experiments.live.simulated.fleet import live_fleet
from experiments.live.simulated.outcome import Machine, Outcome, Placements
from experiments.live.simulated.replay import LiveRun, replay
from experiments.live.simulated.shape import Delays, FleetShape
from experiments.live.simulated.simulation import has_pools
from experiments.live.simulated.slices import Slice, SliceSpec, take_slice
from experiments.live.simulated.tries import halved_speeds
from simulator.request import SimRequest
from tailrace.cluster import Pool

# Fast and with room: seconds of wall time.
SHAPE = FleetShape(
    workers=4,
    profile="llama-3.1-8b-h100",
    speed=1.0,
    seats=16,
    kv_blocks=1024,
    max_tokens=64,
    reasons=True,
    prefill_instances=1,
)
SPEC = SliceSpec(8, 20.0, 0.5, "llama-3.1-8b-h100", 0.5, 8, 400, 3)


def _slice() -> Slice:
    requests = [
        SimRequest(f"q{n}", 0.05 * n, 40 + 17 * n % 200, 12 * (n % 2), 1 + 5 * n % 40) for n in range(40)
    ]
    return Slice("test", "made up", requests, SHAPE, 0.1, 20.0, 1)


@pytest.mark.slow
async def test_a_slice_on_both_sides() -> None:
    trace_slice = _slice()
    progress: list[int] = []
    async with live_fleet(SHAPE) as fleet:
        for policy in ("round_robin", "ares"):
            await fleet.reset(policy, has_pools(policy))
            await fleet.wait_idle()
            live = await replay(fleet, policy, trace_slice.requests, progress.append)
            row = compare(trace_slice, policy, live)
            assert (live.lost, live.lost_why) == (0, "")
            assert live.tokens == trace_slice.output_tokens
            assert live.outcome.finished == 40 and all(run.finished == 40 for run in row.simulated)
            assert progress[-1] == 40
            assert not math.isnan(row.ratios["latency"].mean)
            # Placements are known of requests that lasted until a report.
            assert len(live.outcome.placed) > 20 and set(live.outcome.placed.values()) <= set(SHAPE.names)
            if policy == "ares":
                assert live.outcome.migrations.get("prefill done", 0) > 0
                assert set(live.outcome.placed.values()) == {"worker-0"}
                assert row.same_instance == 1.0
            described = row.as_dict()
            assert described["within"] in (True, False, None)


def test_a_slice_is_scaled_to_the_load() -> None:
    light = take_slice("r1", None, SPEC)
    heavy = take_slice("r1", None, replace(SPEC, load=0.75))
    assert math.isclose(heavy.rate_per_s, 1.5 * light.rate_per_s)
    for trace_slice in (light, heavy):
        rate_per_s = len(trace_slice.requests) / trace_slice.requests[-1].arrival_s
        assert math.isclose(rate_per_s, trace_slice.rate_per_s, rel_tol=0.25), (
            "leaving out long requests must not lower the rate"
        )
    assert max(r.output_tokens for r in heavy.requests) <= 400
    longest = max(r.prompt_tokens + r.output_tokens for r in light.requests)
    assert light.shape.max_model_len >= longest
    assert list(light.shape.pools().values()).count(Pool.PREFILL) == light.shape.prefill_instances


def test_half_the_speed_is_the_same_slice_in_twice_the_time() -> None:
    first, second = (take_slice("r1", None, spec) for spec in halved_speeds(SPEC, 2))
    assert len(first.requests) == len(second.requests)
    assert second.shape == replace(first.shape, speed=first.shape.speed / 2)
    for ours, theirs in zip(first.requests, second.requests, strict=True):
        assert (theirs.prompt_tokens, theirs.output_tokens) == (ours.prompt_tokens, ours.output_tokens)
        assert math.isclose(theirs.arrival_s, 2 * ours.arrival_s)


async def test_a_run_on_a_slow_machine_is_repeated_at_half_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[float, list[str]]] = []

    async def compare_slice(trace_slice: Slice, policies: Sequence[str], console: Console) -> list[Row]:
        tried.append((trace_slice.shape.speed, list(policies)))
        first = len(tried) == 1
        return [
            _row(trace_slice, policy, late=policy != "ares" and first, lost=policy == "arrow")
            for policy in policies
        ]

    monkeypatch.setattr(tries, "_compare_slice", compare_slice)
    policies = ["ares", "arrow", "pascal"]
    compared = await tries.compare_trace("r1", None, SPEC, policies, 2, Console(quiet=True))
    # A policy that lost a request is reported and not repeated.
    assert tried == [(SPEC.speed, policies), (SPEC.speed / 2, ["pascal"])]
    assert [(row.policy, row.speed) for row in compared.rows] == [
        ("ares", SPEC.speed),
        ("arrow", SPEC.speed),
        ("pascal", SPEC.speed / 2),
    ]
    assert [trace_slice.shape.speed for trace_slice in compared.slices] == [SPEC.speed, SPEC.speed / 2]


def _row(trace_slice: Slice, policy: str, late: bool, lost: bool) -> Row:
    nothing = Spread.of([])
    live = LiveRun(
        outcome=Outcome(0, 0, nothing, nothing, nothing, {}, {}, 0),
        lost=int(lost),
        lost_why="",
        tokens=0,
        machine=Machine(0.0, 1.0 if late else 0.0, 0.0, 0.03, {}),
        placements=Placements(0.0, 0.0, 0.0, 0.0),
        delays=Delays(report_s=0.007, open_s=0.010, commit_s=0.010),
        migrations_aborted=0,
        wall_s=0.0,
    )
    return Row(trace_slice.trace, policy, trace_slice.shape.speed, live, [], {}, {}, 0.0, 0.0, 0.0, 0.0)


def test_percentiles_of_a_histogram() -> None:
    bucket = "h_bucket"
    before = Counts({(bucket, (("le", "1.0"),)): 10.0, (bucket, (("le", "+Inf"),)): 10.0})
    after = Counts({(bucket, (("le", "1.0"),)): 20.0, (bucket, (("le", "+Inf"),)): 20.0})
    assert after.since(before).percentile("h", 0.5) == 0.5
    assert math.isnan(after.since(after).percentile("h", 0.5))


def test_ratios_of_empty_spreads_are_nan() -> None:
    nothing, something = Spread.of([]), Spread.of([1.0, 3.0])
    assert something.over(Spread(1.0, 1.0, 1.0)).mean == 2.0
    assert math.isnan(nothing.over(something).p50)


def test_a_verdict_for_the_mean_of_the_seeds_and_one_for_the_nearest() -> None:
    even = Spread(1.0, 1.0, 1.0)
    live = LiveRun(
        outcome=Outcome(1, 1, ttft=even, tpot=even, latency=even, placed={}, migrations={}, preemptions=0),
        lost=0,
        lost_why="",
        tokens=1,
        machine=Machine(0.0, 0.0, 0.0, 0.064, {}),
        placements=Placements(0.0, 0.0, 0.0, 0.0),
        delays=Delays(0.0, 0.0, 0.0),
        migrations_aborted=0,
        wall_s=1.0,
    )
    row = Row(
        trace="made up",
        policy="fcfs",
        speed=1.0,
        live=live,
        simulated=[],
        ratios={"ttft": Spread(1.1, 1.0, float("nan")), "tpot": Spread(1.0, 1.0, 1.5)},
        simulated_range={
            "ttft": (even, even),
            "tpot": (Spread(1.0, 1.0, 0.8), Spread(1.0, 1.0, 1.4)),
        },
        same_instance=1.0,
        same_instance_simulated=1.0,
        moved_share=0.0,
        moved_share_simulated=0.0,
    )
    assert (row.within, row.within_range) == (False, True)
    further = replace(row, ratios={"tpot": Spread(1.0, 1.0, 1.7)})
    assert (further.within, further.within_range) == (False, False)
    slow = replace(row, live=replace(live, machine=Machine(0.0, 0.05, 0.0, 0.064, {})))
    assert (slow.within, slow.within_range) == (None, None)
