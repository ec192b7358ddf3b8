"""`make test-models`: every architecture, in every way that vLLM runs it, each stream moved twice.

A cell of the table is one architecture with Model Runner V1 or V2, with or without async scheduling, on one
device or two: its streams run once undisturbed and once while each is moved. All tokens must be the same; a
stream whose tokens are not is compared once more with the engine to itself. V2 runs in Triton's interpreter,
so times say nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.models.cell import MOVES, Result
from benchmarks.models.cells import NAMES, Cell, cells_of, named
from benchmarks.models.lanes import Lane
from benchmarks.report import RESULTS, save


def main() -> None:
    parser = argparse.ArgumentParser(prog="make test-models", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        default=list(NAMES),
        metavar="NAME",
        help=f"architectures ({', '.join(NAMES)}), or cells ('gemma3, V2, async')",
    )
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--at-a-time", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="keep what models.json has that is right")
    given = parser.parse_args()
    try:
        cells = named(given.names)
    except KeyError as error:
        parser.error(f"no architecture or cell called {error}; there are {', '.join(NAMES)}")
    # By cell; of other names than were asked for, too.
    results = _measured(given.streams) if given.resume else {}

    # So that a run that is ended leaves no processes, as with Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def took(cell: Cell, result: Result) -> None:
        results[str(cell)] = result
        measured = sum(str(each) in results for each in cells)
        print(f"[{measured}/{len(cells)}] {cell}: {_words(result)}", flush=True)
        _save(given.streams, results)

    with tempfile.TemporaryDirectory(prefix="tailrace-models-") as folder:
        left = [cell for cell in cells if str(cell) not in results]
        asyncio.run(_all(left, Path(folder), given.streams, given.at_a_time, took))
    Console().print(_table(cells, results))
    wrong = [str(cell) for cell in cells if not _right(results[str(cell)])]
    path = _save(given.streams, results)
    print(f"{len(cells) - len(wrong)} of {len(cells)} cells are right; {path}")
    if wrong:
        print("not right: " + "; ".join(wrong))
        sys.exit(1)


async def _all(
    cells: list[Cell], folder: Path, streams: int, at_a_time: int, took: Callable[[Cell, Result], None]
) -> None:
    """The quick ones first."""
    for several, v2 in itertools.product((False, True), (False, True)):
        part = [cell for cell in cells if (bool(cell.devices), cell.v2) == (several, v2)]
        # Cells side by side are of different models: at a new one vLLM looks in a process of its own, and
        # keeps what it saw.
        left = deque(sorted(part, key=lambda cell: (cell.devices, cell.async_scheduling)))

        async def lane(v2: bool = v2, left: deque[Cell] = left) -> None:
            async with Lane(v2, folder, streams) as measuring:
                while left:
                    cell = left.popleft()
                    took(cell, await measuring.measure(cell))

        async with asyncio.TaskGroup() as lanes:
            for _ in range(min(at_a_time, len(left))):
                lanes.create_task(lane())


def _save(streams: int, results: Mapping[str, Result]) -> Path:
    rows = [
        {"cell": str(cell), **asdict(cell), **asdict(results[str(cell)])}
        for cell in (each for name in NAMES for each in cells_of(name))
        if str(cell) in results
    ]
    return save("models", {"streams": streams, "moves": MOVES, "cells": rows})


def _measured(streams: int) -> dict[str, Result]:
    """Cells that an earlier run found right, with as many streams."""
    path = RESULTS / "models.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    if before.get("streams") != streams:
        return {}
    wanted = {each.name for each in fields(Result)}
    found = {
        row["cell"]: Result(**{name: value for name, value in row.items() if name in wanted})
        for row in before["cells"]
    }
    return {cell: result for cell, result in found.items() if _right(result)}


def _right(result: Result) -> bool:
    moved = result.fewest_moves >= MOVES
    same = result.equal + result.alone
    return not result.error and moved and result.streams > 0 and same == result.streams


def _words(result: Result) -> str:
    if result.error:
        return result.error
    moves = f"{result.live} moves live, {result.replayed} by replay"
    reason = f" ({result.reason})" if result.reason else ""
    alone = f", {result.alone} more with the engine to itself" if result.alone else ""
    return f"{result.equal} of {result.streams} equal{alone}, {moves}{reason}, {result.seconds:.0f} s"


def _table(cells: list[Cell], results: Mapping[str, Result]) -> Table:
    table = Table(title="Streams that are the undisturbed ones")
    for name in ("architecture", "runner", "scheduling", "devices", "equal", "alone", "live", "replay", ""):
        table.add_column(name)
    for cell in cells:
        result = results[str(cell)]
        table.add_row(
            cell.name,
            f"V{2 if cell.v2 else 1}",
            "async" if cell.async_scheduling else "sync",
            cell.devices,
            f"{result.equal}/{result.streams}",
            str(result.alone or ""),
            str(result.live),
            str(result.replayed),
            result.error or result.reason,
        )
    return table


if __name__ == "__main__":
    main()
