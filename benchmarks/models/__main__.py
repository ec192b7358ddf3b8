"""`make test-models`: every architecture, in every way that vLLM runs it, each stream moved twice.

A cell of the table is one architecture with Model Runner V1 or V2, with or without async scheduling: its
streams run once undisturbed and once while each is moved. All tokens must be the same. V2 runs in Triton's
interpreter, so times say nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.models.cell import MOVES, Result
from benchmarks.models.cells import NAMES, Cell, folder_of, run_cell
from benchmarks.report import save


def main() -> None:
    parser = argparse.ArgumentParser(prog="make test-models", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES), metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--at-a-time", type=int, default=2)
    given = parser.parse_args()
    unknown = set(given.names) - set(NAMES)
    if unknown:
        parser.error(f"no architecture called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    cells = [
        Cell(name, v2, async_scheduling)
        for name in given.names
        for v2 in (False, True)
        for async_scheduling in (False, True)
    ]
    with tempfile.TemporaryDirectory(prefix="tailrace-models-") as folder:
        results = asyncio.run(_all(cells, Path(folder), given.streams, given.at_a_time))
    Console().print(_table(cells, results))
    rows = [
        {"cell": str(cell), **asdict(cell), **asdict(result)}
        for cell, result in zip(cells, results, strict=True)
    ]
    path = save("models", {"streams": given.streams, "moves": MOVES, "cells": rows})
    wrong = [str(cell) for cell, result in zip(cells, results, strict=True) if not _right(result)]
    print(f"{len(cells) - len(wrong)} of {len(cells)} cells are right; {path}")
    if wrong:
        print("not right: " + "; ".join(wrong))
        sys.exit(1)


async def _all(cells: list[Cell], folder: Path, streams: int, at_a_time: int) -> list[Result]:
    slots, ended = asyncio.Semaphore(at_a_time), 0
    models = {cell.name: folder_of(cell.name, folder) for cell in cells}

    async def one(cell: Cell) -> Result:
        nonlocal ended
        async with slots:
            result = await run_cell(cell, models[cell.name], streams)
        ended += 1
        print(f"[{ended}/{len(cells)}] {cell}: {_words(result)}", flush=True)
        return result

    return list(await asyncio.gather(*(one(cell) for cell in cells)))


def _right(result: Result) -> bool:
    moved = result.fewest_moves >= MOVES
    return not result.error and moved and result.streams > 0 and result.equal == result.streams


def _words(result: Result) -> str:
    if result.error:
        return result.error
    moves = f"{result.live} moves live, {result.replayed} by replay"
    reason = f" ({result.reason})" if result.reason else ""
    return f"{result.equal} of {result.streams} equal, {moves}{reason}, {result.seconds:.0f} s"


def _table(cells: list[Cell], results: list[Result]) -> Table:
    table = Table(title="Streams that are the undisturbed ones")
    for name in ("architecture", "runner", "scheduling", "equal", "live", "replay", ""):
        table.add_column(name)
    for cell, result in zip(cells, results, strict=True):
        table.add_row(
            cell.name,
            f"V{2 if cell.v2 else 1}",
            "async" if cell.async_scheduling else "sync",
            f"{result.equal}/{result.streams}",
            str(result.live),
            str(result.replayed),
            result.error or result.reason,
        )
    return table


if __name__ == "__main__":
    main()
