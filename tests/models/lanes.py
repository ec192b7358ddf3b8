"""Processes that measure cells, one at a time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.models.cell import Result
from tests.models.cells import Cell, run_config


class Lane:
    """A cell server of one model runner; an asynchronous context manager."""

    def __init__(self, v2: bool, folder: Path, streams: int) -> None:
        self._v2 = v2
        self._folder = folder
        self._streams = streams
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.models.cell_server"),
            *(["--v2"] if self._v2 else []),
            stdin=PIPE,
            stdout=PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process and self._process.stdin
        if kind is not None and self._process.returncode is None:
            # Also kills the process of the cell.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stdin.close()
        await self._process.wait()

    async def measure(self, cell: Cell) -> Result:
        """Measure a cell; failures are in the result. Raise RuntimeError if the cell server has exited."""
        assert self._process and self._process.stdin and self._process.stdout
        config = run_config(cell, self._folder, self._streams)
        self._process.stdin.write(json.dumps(asdict(config)).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the cell server has exited; its output is above")
        return Result(**json.loads(line))


async def run_cell(cell: Cell, folder: Path, streams: int) -> Result:
    """Measure one cell."""
    async with Lane(cell.v2, folder, streams) as lane:
        return await lane.measure(cell)
