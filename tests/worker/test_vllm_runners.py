"""A sample of `make test-models`: vLLM's Model Runner V2, in a process of its own in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models.cell import MOVES
from benchmarks.models.cells import Cell
from benchmarks.models.lanes import run_cell

pytest.importorskip("vllm", reason="the vLLM engine is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STREAMS = 8


@pytest.mark.parametrize("cell", [Cell("tiny", v2=True, async_scheduling=True)], ids=str)
async def test_streams_that_move_are_the_undisturbed_ones(cell: Cell, tmp_path: Path) -> None:
    result = await run_cell(cell, tmp_path, STREAMS)
    assert result.error == ""
    assert (result.equal, result.live) == (STREAMS, MOVES * STREAMS)
