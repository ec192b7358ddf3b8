"""`make test-models`: every architecture in every run configuration of vLLM, each stream migrated twice.

A cell of the table is one architecture with Model Runner V1 or V2, with or without async scheduling, on one
device or two: its streams run once undisturbed and once while each is migrated. All tokens must be equal; a
stream with other tokens is compared again with the engine to itself. V2 runs in Triton's interpreter, so
times are meaningless.
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

from tests.harness.report import RESULTS, save
from tests.models.cell import MOVES, Result
from tests.models.cells import NAMES, Cell, cells_of, select_cells
from tests.models.lanes import Lane


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
    parser.add_argument("--resume", action="store_true", help="keep the passed cells of models.json")
    options = parser.parse_args()
    try:
        cells = select_cells(options.names)
    except KeyError as error:
        parser.error(f"unknown architecture or cell {error}; choose from {', '.join(NAMES)}")
    # By cell, including cells that were not selected.
    results = _read_results(options.streams) if options.resume else {}

    # Leave no processes behind on SIGTERM, as on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def on_result(cell: Cell, result: Result) -> None:
        results[str(cell)] = result
        measured = sum(str(each) in results for each in cells)
        print(f"[{measured}/{len(cells)}] {cell}: {_describe(result)}", flush=True)
        _save(options.streams, results)

    with tempfile.TemporaryDirectory(prefix="tailrace-models-") as folder:
        remaining = [cell for cell in cells if str(cell) not in results]
        asyncio.run(_measure_all(remaining, Path(folder), options.streams, options.at_a_time, on_result))
    Console().print(_table(cells, results))
    failed_cells = [str(cell) for cell in cells if not _passed(results[str(cell)])]
    path = _save(options.streams, results)
    print(f"{len(cells) - len(failed_cells)} of {len(cells)} cells passed; {path}")
    if failed_cells:
        print("failed: " + "; ".join(failed_cells))
        sys.exit(1)


async def _measure_all(
    cells: list[Cell], folder: Path, streams: int, at_a_time: int, on_result: Callable[[Cell, Result], None]
) -> None:
    """Measure the fast cells first."""
    for several, v2 in itertools.product((False, True), (False, True)):
        part = [cell for cell in cells if (bool(cell.devices), cell.v2) == (several, v2)]
        # Concurrent cells have different models: vLLM inspects a new model in a process of its own, and
        # caches the result.
        remaining = deque(sorted(part, key=lambda cell: (cell.devices, cell.async_scheduling)))

        async def lane(v2: bool = v2, remaining: deque[Cell] = remaining) -> None:
            async with Lane(v2, folder, streams) as measuring:
                while remaining:
                    cell = remaining.popleft()
                    on_result(cell, await measuring.measure(cell))

        async with asyncio.TaskGroup() as lanes:
            for _ in range(min(at_a_time, len(remaining))):
                lanes.create_task(lane())


def _save(streams: int, results: Mapping[str, Result]) -> Path:
    rows = [
        {"cell": str(cell), **asdict(cell), **asdict(results[str(cell)])}
        for cell in (each for name in NAMES for each in cells_of(name))
        if str(cell) in results
    ]
    return save("models", {"streams": streams, "moves": MOVES, "cells": rows})


def _read_results(streams: int) -> dict[str, Result]:
    """Return the cells that passed in an earlier run with as many streams."""
    path = RESULTS / "models.json"
    previous = json.loads(path.read_text()) if path.exists() else {}
    if previous.get("streams") != streams:
        return {}
    wanted = {each.name for each in fields(Result)}
    found = {
        row["cell"]: Result(**{name: value for name, value in row.items() if name in wanted})
        for row in previous["cells"]
    }
    return {cell: result for cell, result in found.items() if _passed(result)}


def _passed(result: Result) -> bool:
    moved = result.fewest_moves >= MOVES
    same = result.equal + result.alone
    return not result.error and moved and result.streams > 0 and same == result.streams


def _describe(result: Result) -> str:
    if result.error:
        return result.error
    moves = f"{result.live} moves live, {result.replayed} by replay"
    reason = f" ({result.reason})" if result.reason else ""
    alone = f", {result.alone} more with the engine to itself" if result.alone else ""
    return f"{result.equal} of {result.streams} equal{alone}, {moves}{reason}, {result.seconds:.0f} s"


def _table(cells: list[Cell], results: Mapping[str, Result]) -> Table:
    table = Table(title="Streams equal to the undisturbed ones")
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
