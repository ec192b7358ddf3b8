"""Workloads: clipping, scaling, merging, writing, reading and resolving."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.claims.arrow.statistics import load_per_minute
from simulator.request import SimRequest
from simulator.workloads import jsonl
from simulator.workloads.arrivals import at_rate, clipped, fit, mean_rate_per_s, merged, scaled
from simulator.workloads.base import Clip, Workload, WorkloadError
from simulator.workloads.resolve import DEFAULT_COUNT, WorkloadOptions, resolve_workload

moderate = settings(max_examples=30, deadline=None, derandomize=True)


@st.composite
def some_workload(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(1, 12))
    times = sorted(draw(st.lists(st.floats(0.0, 1e4), min_size=count, max_size=count)))
    lengths = st.integers(1, 10**6)
    requests = [
        SimRequest(f"r{n}", at_s, draw(lengths), draw(st.integers(0, 10**6)), draw(lengths))
        for n, at_s in enumerate(times)
    ]
    return Workload("some", requests, "made up")


def plain(*arrivals_s: float, prompt: int = 10, answer: int = 5) -> Workload:
    requests = [SimRequest(f"r{n}", at_s, prompt, 0, answer) for n, at_s in enumerate(arrivals_s)]
    return Workload("plain", requests, "made up")


def arrivals(workload: Workload) -> list[float]:
    return [request.arrival_s for request in workload.requests]


@moderate
@given(workload=some_workload())
def test_a_written_workload_is_read_unchanged(
    workload: Workload, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("workload") / "requests.jsonl"
    jsonl.write_jsonl(workload, path)
    assert list(jsonl.load(path).requests) == list(workload.requests)


def test_an_unwritable_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no-such-folder"):
        jsonl.write_jsonl(plain(0.0), tmp_path / "no-such-folder" / "requests.jsonl")


@moderate
@given(workload=some_workload(), speed=st.floats(0.01, 100.0))
def test_scaling_divides_times_and_keeps_requests_in_order(workload: Workload, speed: float) -> None:
    faster = scaled(workload, speed)
    assert [r.request_id for r in faster.requests] == [r.request_id for r in workload.requests]
    assert arrivals(faster) == sorted(arrivals(faster))
    assert arrivals(faster) == pytest.approx([at_s / speed for at_s in arrivals(workload)])


def test_scaling_to_a_rate() -> None:
    workload = at_rate(plain(10.0, 11.0, 30.0), 4.0)
    assert mean_rate_per_s(workload.requests) == pytest.approx(4.0)
    assert arrivals(workload) == pytest.approx([0.25, 0.275, 0.75])


@pytest.mark.parametrize("workload", [plain(1.0), plain(1.0, 1.0)])
def test_a_workload_without_a_rate_cannot_be_scaled_to_one(workload: Workload) -> None:
    with pytest.raises(WorkloadError, match="have no rate"):
        at_rate(workload, 4.0)


@pytest.mark.parametrize("speed", [0.0, -2.0, float("nan"), float("inf")])
def test_invalid_speeds_are_errors(speed: float) -> None:
    with pytest.raises(WorkloadError, match="speed must be"):
        scaled(plain(0.0, 1.0), speed)


@moderate
@given(workloads=st.lists(some_workload(), min_size=1, max_size=4))
def test_merging_keeps_every_request_in_order(workloads: list[Workload]) -> None:
    together = merged("all", workloads)
    assert arrivals(together) == sorted(arrivals(together))
    assert len({r.request_id for r in together.requests}) == sum(len(w.requests) for w in workloads)
    for place, workload in enumerate(workloads):
        mine = [r for r in together.requests if r.request_id.startswith(f"{place}/")]
        assert [(r.arrival_s, r.prompt_tokens) for r in mine] == [
            (r.arrival_s, r.prompt_tokens) for r in workload.requests
        ]


def test_merging_no_workloads_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="nothing to merge"):
        merged("all", [])


@moderate
@given(
    workload=some_workload(),
    start_s=st.floats(0.0, 5e3),
    duration_s=st.none() | st.floats(1.0, 1e4),
    count=st.none() | st.integers(1, 12),
)
def test_a_clip_limits_time_and_count(
    workload: Workload, start_s: float, duration_s: float | None, count: int | None
) -> None:
    clip = Clip(start_s, duration_s, count)
    inside = [r for r in workload.requests if start_s <= r.arrival_s < clip.end_s][:count]
    kept = clip.cut(workload.requests)
    assert [r.request_id for r in kept] == [r.request_id for r in inside]
    assert [r.arrival_s for r in kept] == pytest.approx([r.arrival_s - start_s for r in inside])


def test_the_end_of_a_window_is_exclusive() -> None:
    assert arrivals(clipped(plain(0.0, 1.0, 2.0, 3.0), Clip(1.0, 2.0))) == [0.0, 1.0]


def test_an_empty_window_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="plain: no requests from 5 s to 6 s"):
        clipped(plain(0.0, 1.0), Clip(5.0, 1.0))


@pytest.mark.parametrize(
    ("start_s", "duration_s", "count"),
    [
        (-1.0, None, None),
        (float("nan"), None, None),
        (0.0, 0.0, None),
        (0.0, float("inf"), None),
        (0.0, None, 0),
    ],
)
def test_invalid_clips_are_errors(start_s: float, duration_s: float | None, count: int | None) -> None:
    with pytest.raises(WorkloadError, match=r"window|at least one"):
        Clip(start_s, duration_s, count)


def test_fitting_cuts_prompts_and_drops_requests_that_cannot_fit() -> None:
    requests = [
        SimRequest("fits", 0.0, 60, 20, 20),
        SimRequest("cut", 1.0, 500, 0, 30),
        SimRequest("too long", 2.0, 1, 50, 50),
    ]
    fitted = fit(Workload("three", requests, "made up"), 100)
    assert [(r.request_id, r.prompt_tokens) for r in fitted.requests] == [("fits", 60), ("cut", 70)]
    assert "to fit 100 tokens 1 of 3 prompts cut, 1 left out" in fitted.source
    with pytest.raises(WorkloadError, match="no request fits"):
        fit(Workload("one", requests[2:], "made up"), 100)


def test_a_generator_is_found_by_name() -> None:
    options = WorkloadOptions(seed=5, rate_per_s=2.0)
    workload = resolve_workload("r1", options)
    assert len(workload.requests) == DEFAULT_COUNT
    assert resolve_workload("r1", options).requests == workload.requests
    assert "seed 5" in workload.source


def test_a_generator_with_a_duration() -> None:
    workload = resolve_workload("mix", WorkloadOptions(rate_per_s=5.0, duration_s=100.0))
    assert 400 < len(workload.requests) < 600
    assert arrivals(workload)[-1] < 100.0
    short = resolve_workload("mix", WorkloadOptions(rate_per_s=5.0, duration_s=100.0, count=7))
    assert len(short.requests) == 7


def test_a_file_with_its_format(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    jsonl.write_jsonl(plain(0.0, 10.0, 20.0, prompt=100), path)
    spec = f"jsonl:{path}"
    assert arrivals(resolve_workload(spec, WorkloadOptions())) == [0.0, 10.0, 20.0]
    assert arrivals(resolve_workload(spec, WorkloadOptions(speed=2.0))) == [0.0, 5.0, 10.0]
    assert arrivals(resolve_workload(spec, WorkloadOptions(rate_per_s=1.0))) == [0.0, 1.0, 2.0]
    assert arrivals(resolve_workload(spec, WorkloadOptions(start_s=10.0, count=1))) == [0.0]
    # The window is in the time of the trace, whatever the speed.
    cut = resolve_workload(spec, WorkloadOptions(speed=10.0, duration_s=15.0))
    assert arrivals(cut) == [0.0, 1.0]
    short = resolve_workload(spec, WorkloadOptions(max_model_len=50))
    assert {r.prompt_tokens for r in short.requests} == {45}


def test_several_workloads_share_rate_and_count(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    jsonl.write_jsonl(plain(*(float(n) for n in range(100))), path)
    spec = f"jsonl:{path}, r1, r1"
    workload = resolve_workload(spec, WorkloadOptions(rate_per_s=6.0, count=20))
    kinds = [r.request_id.split("/")[0] for r in workload.requests]
    assert sorted(kinds) == ["0"] * 7 + ["1"] * 7 + ["2"] * 6
    lengths = {
        place: [r.output_tokens for r in workload.requests if r.request_id.startswith(place)]
        for place in ("1/", "2/")
    }
    assert lengths["1/"][:6] != lengths["2/"]
    assert arrivals(workload) == sorted(arrivals(workload))


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("r2", WorkloadOptions(rate_per_s=1.0), r"unknown workload 'r2'; generators: r1, .*azure:PATH"),
        ("parquet:x", WorkloadOptions(), "unknown format 'parquet'"),
        ("azure:", WorkloadOptions(), "'azure:' names no file: give azure:PATH"),
        ("azure:/no/such/file.csv", WorkloadOptions(), r"/no/such/file\.csv: No such file"),
        ("r1", WorkloadOptions(), "r1 is generated and needs a rate"),
        ("r1", WorkloadOptions(rate_per_s=1.0, speed=2.0), "it has a rate, not a speed"),
        ("r1", WorkloadOptions(rate_per_s=1.0, start_s=5.0), "not a speed or a start"),
        ("r1", WorkloadOptions(rate_per_s=-1.0), "rate must be"),
        ("r1", WorkloadOptions(rate_per_s=-1.0, duration_s=10.0), "rate must be"),
        ("r1", WorkloadOptions(rate_per_s=float("nan"), duration_s=10.0), "rate must be"),
        ("r1", WorkloadOptions(rate_per_s=0.001, duration_s=0.001), "nothing arrives from 0 s to 0.001 s"),
        (
            "r1,r1,r1",
            WorkloadOptions(rate_per_s=1.0, count=2),
            "--count is 2: 3 workloads need",
        ),
    ],
)
def test_invalid_specifications_are_errors(spec: str, options: WorkloadOptions, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        resolve_workload(spec, options)


def test_a_file_without_a_format_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    jsonl.write_jsonl(plain(0.0), path)
    with pytest.raises(WorkloadError, match=f"put its format before it, as in jsonl:{path}"):
        resolve_workload(str(path), WorkloadOptions())


def test_dates_instead_of_seconds_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    jsonl.write_jsonl(plain(1_700_000_000.0, 1_700_000_001.0), path)
    with pytest.raises(WorkloadError, match=r"field 'arrival_s': .* 1\.7e\+09 s after"):
        resolve_workload(f"jsonl:{path}", WorkloadOptions())
    window = resolve_workload(f"jsonl:{path}", WorkloadOptions(start_s=1_700_000_000.0))
    assert arrivals(window) == [0.0, 1.0]


def test_a_trace_takes_a_speed_or_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    jsonl.write_jsonl(plain(0.0, 1.0), path)
    with pytest.raises(WorkloadError, match="not both"):
        resolve_workload(f"jsonl:{path}", WorkloadOptions(speed=2.0, rate_per_s=2.0))


def test_load_per_minute_excludes_minutes_without_requests() -> None:
    # Two in the first minute from 30 s on, none in the second, one in the third.
    load = load_per_minute(plain(30.0, 89.0, 151.0, prompt=100, answer=7).requests)
    assert load.prompt_tokens.tolist() == [200, 100]
    assert load.output_tokens.tolist() == [14, 7]
    assert load.prompt_variation() == pytest.approx(50.0 / 150.0)
    assert load.correlation() == pytest.approx(1.0)


def test_constant_load_has_no_correlation() -> None:
    load = load_per_minute(plain(0.0, 60.0, 120.0).requests)
    assert load.prompt_variation() == 0.0
    assert load.correlation() is None
    with pytest.raises(WorkloadError, match="no requests"):
        load_per_minute([])
