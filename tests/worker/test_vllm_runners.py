"""A sample of `make test-models`: vLLM's Model Runner V2 in a separate process with Triton's interpreter."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.models.cell import MOVES
from tests.models.cells import Cell
from tests.models.lanes import run_cell

pytest.importorskip("vllm", reason="the vLLM engine is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.vllm

# A greedy one and a seeded one.
STREAMS = 2


@pytest.mark.parametrize("cell", [Cell("tiny", v2=True, async_scheduling=True)], ids=str)
async def test_moved_streams_are_unchanged(cell: Cell, tmp_path: Path) -> None:
    result = await run_cell(cell, tmp_path, STREAMS)
    assert result.error == ""
    assert (result.equal, result.live) == (STREAMS, MOVES * STREAMS)


_IN_V2 = """
import sys
from tests.models.triton_on_cpu import use_model_runner_v2
use_model_runner_v2()
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
async def test_prefixes_are_loaded_from_host_memory() -> None:
    """Some tests for Model Runner V1, run again with V2."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _IN_V2, "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "timeout=500"),
        *("-m", "", "tests/worker/test_vllm_host_tier.py"),
        *("-k", "comes_back or one_load or gone_before or forgotten"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"},
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
