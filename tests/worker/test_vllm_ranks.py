"""Engines with two ranks: streams moved from rank to rank, and errors of impossible sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models.cell import MOVES
from benchmarks.models.cells import Cell
from benchmarks.models.lanes import run_cell
from tailrace.tiny import MODEL_PATH

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from worker_agent.engine.vllm.settings import VllmSettings, vllm_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STREAMS = 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        Cell("tiny", v2=False, async_scheduling=False, tensor=2),
        Cell("tiny", v2=False, async_scheduling=True, tensor=2),
        Cell("tiny", v2=False, async_scheduling=False, stages=2),
    ],
    ids=str,
)
async def test_streams_moved_between_ranks_are_unchanged(cell: Cell, tmp_path: Path) -> None:
    result = await run_cell(cell, tmp_path, STREAMS)
    assert result.error == ""
    assert (result.equal, result.live) == (STREAMS, MOVES * STREAMS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 3}, "must be divisible by tensor parallel size"),
        ({"engine_args": {"data_parallel_size": 2}}, "data_parallel_size 2: start one worker for each"),
        ({"engine_args": {"nnodes": 2}}, "nnodes 2: a worker's ranks are on one machine"),
        ({"engine_args": {"tensor_parallel_size": "two"}}, "tensor_parallel_size 'two': a number of devices"),
        ({"engine_args": {"dtype": "foo"}}, "dtype 'foo': Input should be 'auto', 'half', "),
        ({"max_model_len": 1_000_000}, r"max_model_len \(1000000\) is greater than "),
        ({"engine_args": {"max_model_length": 512}}, "no engine argument max_model_length"),
    ],
)
def test_impossible_settings_are_reported_in_one_line(
    settings: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        # Set as the engine does, and restored afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with pytest.raises(RuntimeError, match=said) as error:
        vllm_config(VllmSettings(model=str(MODEL_PATH), **settings))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
