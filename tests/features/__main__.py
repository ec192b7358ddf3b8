"""`make test-features`: features of vLLM's API on two real workers, each stream migrated and compared.

For each feature it prints the number of streams, of live migrations and of migrations by replay, and how many
answers equal the undisturbed ones. Figures in benchmarks/results/features.json.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.features.rows import Row, as_json, from_json
from tests.features.scenarios import SCENARIOS, Scale
from tests.harness.report import RESULTS, save

_PATH: Final = RESULTS / "features.json"


def table(rows: list[Row]) -> Table:
    """Return the results as a table."""
    shown = Table(box=None, header_style="bold")
    for heading in (
        "FEATURE",
        "SAMPLING",
        "STREAMS",
        "EQUAL",
        "ALONE",
        "UNMOVED",
        "LIVE",
        "REPLAYED",
        "MOVED TWICE",
        "NOTE",
    ):
        shown.add_column(heading, justify="left" if heading in ("FEATURE", "SAMPLING", "NOTE") else "right")
    for row in rows:
        note = "; ".join(filter(None, [row.note, *sorted(row.way_reasons)]))
        figures = (row.streams, row.equal, row.alone, row.unmoved, row.live, row.replayed, row.moved_twice)
        shown.add_row(row.feature, row.sampling, *map(str, figures), note)
    return shown


def main() -> int:
    """Run the features; return 0 if every answer equals the undisturbed one, where it must."""
    parser = argparse.ArgumentParser(prog="make test-features", description=__doc__)
    parser.add_argument("features", nargs="*", metavar="|".join(SCENARIOS), help="default: all")
    parser.add_argument(
        "--streams", type=int, default=Scale().streams, help="streams per row (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="keep the passed scenarios of features.json")
    options = parser.parse_args()
    if unknown := set(options.features) - SCENARIOS.keys():
        parser.error(f"unknown feature {', '.join(sorted(unknown))}; choose from {', '.join(SCENARIOS)}")
    # Stop the fleet on SIGTERM, as on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    selected = options.features or list(SCENARIOS)
    # By scenario, including those that were not selected.
    results = _read_results(options.streams) if options.resume else {}
    with tempfile.TemporaryDirectory(prefix="tailrace-features-") as folder:
        for name in selected:
            if name in results:
                continue
            started, results[name] = time.monotonic(), []
            for row in SCENARIOS[name](Scale(streams=options.streams), Path(folder)):
                results[name].append(row)
                print(f"{row.feature}, {row.sampling}: {row.equal} of {row.streams} equal", flush=True)
                _save(options.streams, results, started=name)
            _save(options.streams, results)
            seconds = time.monotonic() - started
            print(
                f"[{sum(each in results for each in selected)}/{len(selected)}] {name}: {seconds:.0f} s",
                flush=True,
            )
    rows = [row for name in selected for row in results[name]]
    Console().print(table(rows))
    for row in rows:
        for reason in sorted(set(row.failed)):
            print(f"migration failed at first ({row.feature}): {reason}", file=sys.stderr)
    print(f"{sum(row.passed for row in rows)} of {len(rows)} rows passed; {_PATH}")
    return 0 if all(row.passed for row in rows) else 1


def _save(streams: int, results: Mapping[str, list[Row]], started: str = "") -> None:
    """Save the results. `started`: the scenario that does not have all of its rows yet."""
    scenarios = {name: as_json(results[name]) for name in SCENARIOS if name in results}
    save("features", {"streams": streams, "begun": started, "scenarios": scenarios})


def _read_results(streams: int) -> dict[str, list[Row]]:
    """Return the scenarios that passed in an earlier run with as many streams."""
    previous = json.loads(_PATH.read_text()) if _PATH.exists() else {}
    if previous.get("streams") != streams:
        return {}
    complete = {name: rows for name, rows in previous["scenarios"].items() if name != previous["begun"]}
    results = {name: from_json(rows) for name, rows in complete.items()}
    return {name: rows for name, rows in results.items() if all(row.passed for row in rows)}


if __name__ == "__main__":
    sys.exit(main())
