"""The GPU checks as far as they run on a CPU: loads, tables, and the message if there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from benchmarks.gpu import devices, lengths, migration, profile, serving, transfer
from benchmarks.gpu.__main__ import NO_GPU, PARTS, load_part, save
from benchmarks.gpu.model import LLAMA_8B, SMALL, prompt, prompt_ids, write_model
from benchmarks.gpu.setting import KV_BYTES, ON_CPU, ON_GPU, Budget
from tests.harness.loadgen import StreamResult
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]


@given(
    shape=st.sampled_from(lengths.SHAPES),
    count=st.integers(1, 600),
    shortest=st.integers(1, 64),
    spare=st.integers(0, 1_000_000),
)
def test_every_spread_has_the_same_total_kv(shape: str, count: int, shortest: int, spare: int) -> None:
    total = count * shortest + spare
    found = lengths.spread(shape, count, total, shortest)
    assert (len(found), sum(found)) == (count, total)
    assert min(found) >= shortest


def test_shapes_differ_as_named() -> None:
    found = {shape: sorted(lengths.spread(shape, 512, 512 * 640, 32)) for shape in lengths.SHAPES}
    assert found["equal"][0] == found["equal"][-1] == 640
    assert found["uniform"][-1] < 2 * 640 < found["one in sixteen long"][-1] < found["one long"][-1]
    assert found["one long"][-1] < 40_960, "a model of this length has to hold it"
    assert found["one in sixteen long"].count(32) == 480


def test_too_many_requests_for_the_total_are_refused() -> None:
    with pytest.raises(ValueError, match="more than"):
        lengths.spread("equal", 10, 99, 10)


def test_the_step_of_the_shortest_lengths_is_subtracted() -> None:
    steps = {"shortest": 10.0, "equal": 30.0, "uniform": 30.0, "one in sixteen long": 40.0, "one long": 50.0}
    assert lengths.attention_ratio(steps) == {
        "equal": 1.0, "uniform": 1.0, "one in sixteen long": 1.5, "one long": 2.0
    }  # fmt: skip
    assert lengths.attention_ratio({"shortest": 10.0, "equal": 9.0}) == {}, "noise gives no ratio"


def test_the_model_and_its_tokenizer_can_be_loaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", SMALL)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    text = prompt(100, SMALL.vocab_size, 5)
    assert tokenizer.encode(text) == prompt_ids(100, SMALL.vocab_size, 5), "a word is a token"
    assert text != prompt(100, SMALL.vocab_size, 6)
    assert tokenizer.decode([17, 18]) == "t17 t18"
    config = json.loads((folder / "config.json").read_text())
    assert config["num_key_value_heads"] == SMALL.num_key_value_heads
    # The published value for Llama 3.1 8B in 16 bits.
    assert LLAMA_8B.kv_bytes_per_token == 131_072


def test_the_parts_fit_into_80_gb() -> None:
    """Two instances, each with 16.1 GB of weights and 3 GB for graphs and activations."""
    assert 2 * (KV_BYTES + 16.1e9 + 3e9) < 80e9
    available_tokens = KV_BYTES / ON_GPU.shape.kv_bytes_per_token
    served = max(ON_GPU.streams) / 2 * (ON_GPU.prompt_tokens + ON_GPU.output_tokens)
    moved = max(ON_GPU.moved_tokens) + 2000 + ON_GPU.others * 5 * ON_GPU.other_tokens
    assert served < available_tokens
    assert moved < available_tokens
    assert ON_GPU.pool_blocks * ON_GPU.block_tokens * ON_GPU.shape.kv_bytes_per_token < 20e9


def _stream(started: float, times: list[float], tokens: int, error: str = "") -> StreamResult:
    return StreamResult(started, times, times[-1] if times else started, tokens, 200, error)


def test_loads_are_summarized_and_compared() -> None:
    ours = serving.summarize("ours", [_stream(0, [1, 1.5, 2], 3), _stream(0, [0.5, 1.5, 4], 3)])
    theirs = serving.summarize("theirs", [_stream(0, [1, 2], 3), _stream(0, [2, 8], 3)])
    assert (ours.tokens_per_s, theirs.tokens_per_s) == (1.5, 0.75)
    rows = {row["figure"]: row for row in serving.medians([ours, theirs])}
    assert rows["tokens_per_s"] == {
        "streams": 2, "figure": "tokens_per_s", "ours": 1.5, "theirs": 0.75, "ratio": 2.0
    }  # fmt: skip
    shown = serving.table({"medians": list(rows.values())})
    assert shown.columns == ["load", "ours", "theirs", "ratio"]
    assert shown.rows[0] == ["2 streams, tokens per s", "1.50", "0.75", "2.00"]
    with pytest.raises(RuntimeError, match="ours: 1 of 1 streams failed: cut"):
        serving.summarize("ours", [_stream(0, [], 0, "cut")])


def test_migrations_are_shown_by_length_and_mode() -> None:
    move = {"bytes": 2 << 20, "pause_ms": 3.0, "pause_steps": 1.0, "rounds": 2, "mib_per_s": 800.0}
    moves = [move | {"prompt_tokens": n, "mode": m} for n in (1024, 8192) for m in ("live", "stop and copy")]
    moves.append(moves[0] | {"pause_ms": 5.0})
    shown = migration.table({"moves": moves, "others_on_each": 64, "not_run_for_time": ["x"]})
    assert shown.notes == ["not run: out of time: x"]
    assert [row[0] for row in shown.rows][:2] == ["1,024 tokens, live", "1,024 tokens, stop and copy"]
    assert shown.rows[0][1:] == ["2", "4.0", "1.0", "2", "800"]


def test_a_backend_that_failed_has_its_reason_in_the_table() -> None:
    steps = dict.fromkeys((lengths.BASE, *lengths.SHAPES), 2.0) | {lengths.BASE: 1.0}
    good = {"step_ms": steps, "attention_ratio": lengths.attention_ratio(steps)}
    backends = {"TRITON_ATTN": good, "FLASHINFER": "failed: no flashinfer"}
    shown = lengths.table({"requests": 512, "backends": backends})
    assert [row[0].partition(":")[0] for row in shown.rows] == ["TRITON_ATTN"] * 3
    assert shown.notes == ["FLASHINFER: failed: no flashinfer"]
    assert all(len(row) == len(shown.columns) for row in shown.rows)


def test_a_profile_has_a_row_per_figure() -> None:
    shown = profile.table({"profile": {"a": {"b": 1.5, "d": [1.0, 2e-7]}, "c": "x"}})
    assert shown.rows == [["a.b", "1.5"], ["a.d", "1, 2e-07"], ["c", "x"]]


def test_gather_and_scatter_are_timed_and_checked() -> None:
    figures = transfer.run(ON_CPU, Path(), Budget(0.0))
    assert figures["ucx_perftest_gib_per_s"] == {"host": "not run: out of time"}
    assert figures["block_bytes"] == ON_CPU.block_tokens * SMALL.kv_bytes_per_token
    shown = transfer.table(figures)
    assert len(shown.columns) == 1 + len(ON_CPU.moved_blocks)
    shown.render()


def test_figures_of_a_cpu_are_saved_separately(tmp_path: Path) -> None:
    path = save("lengths", ON_CPU, 1.0, {"requests": 8}, tmp_path)
    assert path.name == "gpu-lengths-cpu.json"
    record = json.loads(path.read_text())
    assert record["device"] == "cpu"
    assert {"cpu", "cores", "gpu", "versions"} <= set(record["machine"])
    assert save("lengths", ON_GPU, 1.0, {}, tmp_path).name == "gpu-lengths.json"


def test_every_part_can_be_loaded() -> None:
    for name in PARTS:
        assert callable(load_part(name).run)


def _check_gpu(*arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip


def test_without_a_gpu_the_exit_status_and_message_say_so(tmp_path: Path) -> None:
    completed = _check_gpu("transfer", path=str(tmp_path))
    assert (completed.returncode, "not run: no NVIDIA GPU" in completed.stderr) == (NO_GPU, True)


def test_an_unknown_part_is_an_error() -> None:
    assert "unknown part 'speed'" in _check_gpu("speed", path=os.environ["PATH"]).stderr


LATE_PART = """
import sys, threading
from benchmarks.gpu import __main__ as check
class Late:
    def run(self, setting, model, budget):
        try:
            threading.Event().wait(60)
        finally:
            print("servers stopped")
check.load_part = lambda name: Late()
sys.argv = ["check-gpu", "serving", "lengths", "--device", "cpu", "--budget", "-29.8"]
sys.exit(check.main())
"""


def test_a_part_that_exceeds_its_budget_is_aborted_and_the_next_runs() -> None:
    command = [sys.executable, "-c", LATE_PART]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert completed.returncode == 1, completed.stderr
    assert completed.stdout.count("servers stopped") == 2
    assert "lengths failed: TimeoutError: exceeded its time budget" in completed.stdout


def test_the_output_of_nvidia_smi_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 580.159.04, 81559 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    found = {"name": "NVIDIA H100 80GB HBM3", "driver_version": "580.159.04", "memory.total": "81559 MiB"}
    assert devices.nvidia_gpu() == found
    tool.write_text("#!/bin/sh\necho 'no devices were found' >&2\nexit 6\n")
    assert devices.nvidia_gpu() is None


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_each_part_runs_on_a_cpu(part: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", part, "--device", "cpu", "--results", str(tmp_path)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    record = json.loads((tmp_path / f"gpu-{part}-cpu.json").read_text())
    assert "failed" not in json.dumps(record)
