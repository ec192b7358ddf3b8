"""Every built-in profile loads, increases with the work, and respects the limits of its GPU."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tailrace.profiles import ProfileError, built_in_profiles, load_profile


class Model(NamedTuple):
    """Shape of a model, with the parameters used by every token, and their size in bytes."""

    layers: int
    kv_heads: int
    parameters: float
    weight_bytes: float


class Gpu(NamedTuple):
    """Data sheet values for all GPUs of an instance: dense TFLOPS (TOPS) at the weights' width, and TB/s."""

    teraflops: float
    terabytes_per_s: float


MODELS = {
    "DeepSeek-R1-Distill-Qwen-32B": Model(64, 8, 32.0e9, 2),
    "DeepSeek-R1-Distill-Qwen-7B-W8A8": Model(28, 4, 7.07e9, 1),
    "Llama-3.1-8B": Model(32, 8, 7.5e9, 2),
    "Llama-3.2-3B": Model(28, 8, 3.2e9, 2),
    "Llama-3.1-70B": Model(80, 8, 69.5e9, 2),
    "Qwen2.5-14B": Model(48, 8, 14.0e9, 2),
}
GPUS = {
    "H100-SXM-80GB": Gpu(989, 3.35),
    # The 96 GB part of the Grace Hopper generation has faster memory than the 80 GB one.
    "H100-96GB": Gpu(989, 4.0),
    "H800-SXM-80GB": Gpu(989, 3.35),
    "L40S-48GB": Gpu(362, 0.864),
    "L40-48GB": Gpu(181, 0.864),
    "H20-141GB": Gpu(148, 4.8),
    "2 x H20-141GB": Gpu(296, 9.6),
    "4 x H20-141GB": Gpu(592, 19.2),
    "RTX 4090-24GB": Gpu(330, 1.008),
    "RTX 4090D-24GB": Gpu(588, 1.008),
}


@pytest.mark.parametrize("name", built_in_profiles())
def test_profiles_are_plausible(name: str) -> None:
    profile = load_profile(name)
    model, gpu = MODELS[profile.model], GPUS[profile.gpu]
    assert profile.name == name
    assert set(profile.sources) >= {"prefill", "decode", "kv_bytes_per_token", "kv_capacity_tokens", "swap"}
    assert profile.kv_bytes_per_token == model.layers * model.kv_heads * 128 * 2 * 2
    prefill, decode = profile.prefill, profile.decode
    # Not faster than the data sheet, and not so slow that a unit must be wrong.
    flops_ms = 2 * model.parameters / (gpu.teraflops * 1e9)
    assert flops_ms < prefill.ms_per_token < 5 * flops_ms
    read_ms = model.parameters * model.weight_bytes / (gpu.terabytes_per_s * 1e9)
    assert read_ms < decode.base_ms < 3 * read_ms
    kv_ms = profile.kv_bytes_per_token / (gpu.terabytes_per_s * 1e9)
    assert 0.9 * kv_ms < decode.ms_per_kv_token < 3 * kv_ms
    # The host's link is slower than device memory, and a request's KV is copied in a few of its steps.
    assert profile.swap.bytes_per_s < gpu.terabytes_per_s * 1e12 / 20
    assert 1.0 < profile.swap.ms(2_000 * profile.kv_bytes_per_token) < 3 * decode.base_ms


@pytest.mark.parametrize("name", built_in_profiles())
def test_times_increase_with_the_work(name: str) -> None:
    profile = load_profile(name)
    prefills = [profile.step_ms(profile.prefill.ms(0, n), 0, 0) for n in (1, 100, 1_000, 10_000, 100_000)]
    assert prefills == sorted(prefills) and prefills[0] > 0
    # A later chunk of a prompt costs more than an earlier one of the same length.
    assert profile.prefill.ms(1_000, 2_000) > profile.prefill.ms(0, 1_000)
    batches = [profile.step_ms(0.0, n, 500 * n) for n in (1, 8, 64, 256)]
    assert batches == sorted(batches)
    assert profile.step_ms(0.0, 8, 8_000) > profile.step_ms(0.0, 8, 4_000)
    alone = max(profile.step_ms(5.0, 0, 0), profile.step_ms(0.0, 8, 4_000))
    together = profile.step_ms(5.0, 0, 0) + profile.step_ms(0.0, 8, 4_000)
    assert alone < profile.step_ms(5.0, 8, 4_000) < together


def test_ares_decode_step_at_half_the_kv() -> None:
    """Section 5.3 states 18.23 ms at 50% KV occupancy; the profile was not scaled with that number."""
    profile = load_profile("r1-distill-qwen-7b-w8a8-rtx4090d")
    assert profile.step_ms(0.0, 20, profile.kv_capacity_tokens // 2) == pytest.approx(18.23, rel=0.05)


def test_an_unknown_profile_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError, match=r"no-such.*r1-distill-qwen-32b-h100"):
        load_profile("no-such")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"decode": {"base_ms": -1.0, "ms_per_request": 0.0, "ms_per_kv_token": 0.0}},
            r"decode\.base_ms is -1",
        ),
        ({"decode": {"base_ms": 0.0, "ms_per_request": 0.0, "ms_per_kv_token": 0.0}}, "decode: every"),
        (
            {"prefill": {"base_ms": 1.0, "ms_per_token": -0.1, "ms_per_token_squared": 0.0}},
            r"prefill\.ms_per_token is -0\.1",
        ),
        (
            {"prefill": {"base_ms": 1e300, "ms_per_token": 0.1, "ms_per_token_squared": 0.0}},
            r"prefill\.base_ms is 1e\+300: must be from 0 to 1000000 ms",
        ),
        ({"kv_capacity_tokens": 0}, "kv_capacity_tokens is 0"),
        ({"kv_capacity_tokens": 2**53 + 1}, "kv_capacity_tokens is 9007199254740993: must be from 1 to"),
        ({"gpus": 2}, "unknown field 'gpus'"),
        ({"swap": {"bytes_per_ms": 1.0}}, r"unknown field 'swap\.bytes_per_ms'"),
        ({"kv_bytes_per_token": -4}, "kv_bytes_per_token is -4"),
        ({"swap": {"base_ms": -1.0}}, r"swap\.base_ms is -1"),
        ({"swap": {"bytes_per_s": 0.0}}, r"swap\.bytes_per_s is 0"),
    ],
)
def test_errors_in_a_profile_name_the_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    known = msgspec.to_builtins(load_profile("llama-3.1-8b-h100"))
    path = tmp_path / "bad.json"
    path.write_bytes(msgspec.json.encode({**known, **change}))
    with pytest.raises(ProfileError, match=message):
        load_profile(str(path))
