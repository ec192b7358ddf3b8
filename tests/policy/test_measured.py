"""Measurements of an instance take precedence over a policy's assumptions."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tailrace.actions import Place, SetPool
from tailrace.cluster import Arrival, ClusterView, InstanceView, Pool
from tailrace.perf.measured import Measured
from tailrace.perf.qoe_model import QoeModel
from tailrace.perf.ttft import TtftPredictor
from tailrace.policy.arrow.load import LoadModel
from tailrace.policy.arrow.policy import Arrow
from tailrace.policy.cascade.policy import Cascade
from tailrace.policy.tailrace.policy import Tailrace
from tailrace.profiles import load_profile
from tailrace.records import ProfileRecord, QoeRecord, TtftRecord, profile_kind

PROFILE = load_profile("llama-3.1-8b-h100")


def record(slower: float = 1.0, qoe: QoeRecord | None = None) -> ProfileRecord:
    """Return a record of the profile above, `slower` times as slow."""
    prefill, decode = PROFILE.prefill, PROFILE.decode
    return ProfileRecord(
        kind="k",
        engine="simulated",
        model="m",
        model_fingerprint="f",
        hardware="h",
        step_tokens=2048,
        version="0",
        instance_id="w",
        measured_s=0.0,
        took_s=1.0,
        profile=msgspec.structs.replace(
            PROFILE,
            prefill=msgspec.structs.replace(
                prefill, base_ms=prefill.base_ms * slower, ms_per_token=prefill.ms_per_token * slower
            ),
            decode=msgspec.structs.replace(decode, base_ms=decode.base_ms * slower),
        ),
        prefill_error=0.0,
        prefill_samples=9,
        decode_error=0.0,
        decode_samples=9,
        ttft=TtftRecord(
            base_s=0.01 * slower, per_token_s=2e-5 * slower, per_token_squared_s=0.0, r_squared=1.0, samples=9
        ),
        tpot_s=0.1,
        max_running_tokens=1000,
        qoe=qoe,
    )


def instance(name: str, pool: Pool | None = None, measured: Measured | None = None) -> InstanceView:
    return InstanceView(name, pool=pool, kv_capacity_tokens=100_000, max_model_len=8192, measured=measured)


def view(*instances: InstanceView) -> ClusterView:
    return ClusterView({each.instance_id: each for each in instances})


def test_a_record_is_decoded_unchanged() -> None:
    written = record(2.0, QoeRecord(d=(1.0, 2.0, 3.0, 4.0, 5.0), error=0.1, samples=30))
    assert msgspec.json.decode(msgspec.json.encode(written), type=ProfileRecord) == written


def test_the_kind_identifies_engine_model_and_hardware() -> None:
    kind = profile_kind("vllm", "/models/Qwen3 8B/", "f", "NVIDIA H200", 2048)
    assert kind == profile_kind("vllm", "/models/Qwen3 8B/", "f", "NVIDIA H200", 2048)
    assert kind.startswith("vllm-qwen3-8b-nvidia-h200-") and "/" not in kind
    assert kind != profile_kind("vllm", "/models/Qwen3 8B/", "f", "NVIDIA H100", 2048)
    assert kind != profile_kind("vllm", "/models/Qwen3 8B/", "g", "NVIDIA H200", 2048)


def test_arrow_predicts_ttft_from_measurements() -> None:
    # Two prefill and three decode instances, all idle: a prompt within its SLO causes no flip.
    slow = Measured.of(record(1_000.0))

    def fleet(measured: Measured | None) -> ClusterView:
        pools = [Pool.PREFILL] * 2 + [Pool.DECODE] * 3
        members = (instance(f"w{n}", pool, measured) for n, pool in enumerate(pools))
        return view(*(replace(each, max_running_tokens=1_000) for each in members))

    arrow, arrival = Arrow(ttft_slo_s=2.0), Arrival("r", 500, 100, 0)
    for fast_fleet in (fleet(None), fleet(Measured.of(record()))):
        placed = arrow.place(fast_fleet, arrival, 0.0)
        assert isinstance(placed, Place) and placed.also == ()
    # The measured curve predicts 20 s: Alg. 1 flips a decode instance.
    placed = arrow.place(fleet(slow), arrival, 0.0)
    assert isinstance(placed, Place)
    (move,) = placed.also
    assert isinstance(move, SetPool) and move.pool is Pool.PREFILL


def test_arrow_uses_the_reported_delay_else_the_measured_curve() -> None:
    loads = LoadModel(TtftPredictor(1.0, 0.0, 0.0), 10)
    busy = replace(instance("w", measured=Measured.of(record())), prefill_backlog_tokens=1000, waiting=1)
    assert loads.prefill_delay_s(busy) == pytest.approx(0.01 + 0.02)
    assert loads.prefill_delay_s(replace(busy, measured=None)) == 1.0
    assert loads.prefill_delay_s(replace(busy, prefill_delay_s=7.0)) == 7.0


def test_arrow_limits_a_batch_by_what_was_reported_else_by_the_measured_steps() -> None:
    """Of instances with room for any batch."""
    arrow = Arrow(tpot_slo_s=0.05, profile=PROFILE)
    here = replace(instance("w"), kv_capacity_tokens=10**9)
    fast, slow = (replace(here, measured=Measured.of(record(times))) for times in (1.0, 4.0))
    nominal, unhurried, slower = map(arrow.loads.max_tokens, (here, fast, slow))
    assert nominal == unhurried > slower > 0
    # A step of 64 ms is beyond the SLO with any batch.
    assert arrow.loads.max_tokens(replace(here, measured=Measured.of(record(10.0)))) == 0
    assert arrow.loads.max_tokens(replace(slow, max_running_tokens=77)) == 77


def test_tailrace_prefers_the_instance_measured_as_faster() -> None:
    fast, slow = Measured.of(record()), Measured.of(record(50.0))
    placed = Tailrace().place(view(instance("a", measured=slow), instance("b", measured=fast)), ARRIVAL, 0.0)
    assert isinstance(placed, Place) and placed.instance_id == "b"
    # Instances of equal speed are equivalent, whatever the speed.
    for each in (fast, slow, None):
        placed = Tailrace().place(
            view(instance("a", measured=each), instance("b", measured=each)), ARRIVAL, 0.0
        )
        assert isinstance(placed, Place) and placed.instance_id == "a"


def test_cascade_averages_the_measured_qoe_models() -> None:
    fitted = QoeRecord(d=(2.0, 4.0, 6.0, 8.0, 10.0), error=0.1, samples=30)
    policy = Cascade()
    unknown, known = instance("a"), instance("b", measured=Measured.of(record(qoe=fitted)))
    twice = instance(
        "c", measured=Measured.of(record(qoe=msgspec.structs.replace(fitted, d=(4.0, 8.0, 12.0, 16.0, 20.0))))
    )
    models = policy.planning.models
    assert models([unknown])[0] is policy.planning.model
    assert models([unknown, known])[0] == QoeModel(fitted.d)
    assert models([known, twice])[0] == QoeModel((3.0, 6.0, 9.0, 12.0, 15.0))


def test_without_a_fit_the_qoe_model_follows_from_measured_step_times() -> None:
    assert Measured.of(record(3.0)).qoe == QoeModel.of_profile(record(3.0).profile)


ARRIVAL = Arrival("r", 500, 100, 0)
