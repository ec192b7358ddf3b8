"""Samples: splits by request, files, and errors in files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.predictor.samples import SamplesError, read_samples, split_by_request, write_samples
from tests.predictor.synthetic import ORIGIN, samples

safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors comes with the engine")


@given(requests=st.integers(10, 60), seed=st.integers(0, 1000))
def test_a_split_has_each_request_in_exactly_one_part(requests: int, seed: int) -> None:
    everything = samples(requests, seed)
    split = split_by_request(everything, seed)
    parts = (split.training, split.validation, split.test)
    sets = [set(part.request.tolist()) for part in parts]
    assert sum(map(len, sets)) == len(set().union(*sets)) == requests
    assert sum(map(len, parts)) == len(everything)
    assert all(sets)
    assert len(sets[0]) == int(requests * 0.7)


def test_a_split_keeps_rows_intact() -> None:
    everything = samples(30, 1)
    rows = {
        tuple(row): left for row, left in zip(everything.hidden.tolist(), everything.remaining, strict=True)
    }
    split = split_by_request(everything, 5)
    for part in (split.training, split.validation, split.test):
        for row, left in zip(part.hidden.tolist(), part.remaining, strict=True):
            assert rows[tuple(row)] == left


def test_the_split_depends_only_on_the_seed() -> None:
    everything = samples(40, 1)
    test = [set(split_by_request(everything, seed).test.request.tolist()) for seed in (1, 1, 2)]
    assert test[0] == test[1] != test[2]


def test_too_few_requests_are_an_error() -> None:
    with pytest.raises(ValueError, match="9 requests"):
        split_by_request(samples(9, 0), 0)


def test_samples_are_written_and_read(tmp_path: Path) -> None:
    written = samples(12, 3)
    write_samples(written, tmp_path / "s")
    read = read_samples(tmp_path / "s")
    assert read.origin == ORIGIN
    np.testing.assert_allclose(read.hidden, written.hidden, rtol=1e-3, atol=1e-3)
    for name in ("request", "generated", "remaining", "ended"):
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"remaining": np.zeros(3, np.int32)}, "remaining"),
        ({"generated": np.zeros(4, np.float32)}, "generated"),
        ({"request": np.full(4, -1, np.int32)}, "request"),
        ({"ended": np.zeros(3, np.int32)}, "ended"),
        ({"hidden": np.zeros(4, np.float16)}, "hidden"),
        ({"hidden": np.full((4, 2), np.nan, np.float16)}, "hidden"),
    ],
)
def test_errors_in_a_samples_file_name_the_field(
    change: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]], field: str, tmp_path: Path
) -> None:
    tensors: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {
        **{name: np.zeros(4, np.int32) for name in ("request", "generated", "remaining", "ended")},
        "hidden": np.zeros((4, 2), np.float16),
        **change,
    }
    text = '{"format":"tailrace-length-samples-2","model":"m","interval":20,"step_s":1.0,"batch":1.0}'
    safetensors.save_file(tensors, tmp_path / "s", metadata={"origin": text})
    with pytest.raises(SamplesError, match=rf"{tmp_path}/s: {field}:"):
        read_samples(tmp_path / "s")


def test_other_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"no tensors")
    with pytest.raises(SamplesError, match="cannot be read"):
        read_samples(tmp_path / "s")
    with pytest.raises(SamplesError, match="cannot be read"):
        read_samples(tmp_path / "absent")
    safetensors.save_file({"hidden": np.zeros(2)}, tmp_path / "s")
    with pytest.raises(SamplesError, match="origin"):
        read_samples(tmp_path / "s")
    write_samples(replace(samples(10, 0), origin=ORIGIN.__class__("other", "m", 1, 1.0, 1.0)), tmp_path / "s")
    with pytest.raises(SamplesError, match=r"origin\.format: 'other'"):
        read_samples(tmp_path / "s")
