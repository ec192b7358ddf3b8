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
_DEADLINE_S: Final = 900.0
_LAST_LINES: Final = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """One architecture in one way to run."""

    name: str
    v2: bool
    async_scheduling: bool

    def __str__(self) -> str:
        return f"{self.name}, V{2 if self.v2 else 1}, {'async' if self.async_scheduling else 'sync'}"


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
