"""Runs cells of the table, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.models.architectures import ARCHITECTURES, write_model
from benchmarks.models.cell import PREFIX, Result
from tailrace.tiny import MODEL_PATH

TINY: Final = "tiny"
"""The trained model that Tailrace carries."""

NAMES: Final = (TINY, *ARCHITECTURES)
# Of which layers can be shared by two devices.
_SHARED_LAYERS: Final = (TINY, "llama", "qwen3moe", "deepseekv2", "gemma3", "gptoss", "granitehybrid")
_DEADLINE_S: Final = 900.0
_LAST_LINES: Final = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """One architecture in one way to run."""

    name: str
    v2: bool
    async_scheduling: bool
    # Ranks that share each layer, and stages of layers. With several of either there are two such engines.
    tensor: int = 1
    stages: int = 1

    @property
    def devices(self) -> str:
        """TP 2, PP 2, or nothing for one device."""
        sizes = [f"{name} {size}" for name, size in (("TP", self.tensor), ("PP", self.stages)) if size > 1]
        return " ".join(sizes)

    def __str__(self) -> str:
        way = "async" if self.async_scheduling else "sync"
        return ", ".join(filter(None, [self.name, f"V{2 if self.v2 else 1}", way, self.devices]))


def cells_of(name: str) -> list[Cell]:
    """An architecture's ways to run: each runner and scheduling on one device; V1 on two, where it can."""
    cells = [Cell(name, v2, async_) for v2 in (False, True) for async_ in (False, True)]
    if name in _SHARED_LAYERS:
        cells.append(Cell(name, v2=False, async_scheduling=False, tensor=2))
    if name == TINY:
        cells.append(Cell(name, v2=False, async_scheduling=True, tensor=2))
        cells.append(Cell(name, v2=False, async_scheduling=False, stages=2))
    return cells


def folder_of(name: str, folder: Path) -> Path:
    """The model's folder, written if need be."""
    return MODEL_PATH if name == TINY else write_model(name, folder)


async def run_cell(cell: Cell, model: Path, streams: int) -> Result:
    """Measure one. What went wrong is in the result."""
    arguments = [str(model), "--streams", str(streams)]
    if cell.name != TINY:
        found = ARCHITECTURES[cell.name]
        arguments += ["--dtype", found.dtype, "--random-weights"]
        arguments += [] if found.prefix_caching else ["--no-prefix-caching"]
    arguments += ["--v2"] if cell.v2 else []
    arguments += ["--async-scheduling"] if cell.async_scheduling else []
    arguments += ["--tensor", str(cell.tensor), "--stages", str(cell.stages)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.models.cell",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(_DEADLINE_S):
            output, errors = await process.communicate()
    except TimeoutError:
        return Result(error=f"it took longer than {_DEADLINE_S:.0f} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    for line in output.decode().splitlines():
        if line.startswith(PREFIX):
            return Result(**json.loads(line.removeprefix(PREFIX)))
    # What Triton's bindings say at every exit.
    told = [line for line in errors.decode().splitlines() if not line.startswith(("nanobind:", " - "))]
    last = " / ".join(told[-_LAST_LINES:])
    return Result(error=f"it ended with {process.returncode}: {last}")
