"""`make test-features`: features of vLLM's API on two real workers, each stream moved and compared.

For each: how many streams there were, how many moves were live and how many by replay, and how many answers
were those of the same stream undisturbed. Figures in benchmarks/results/features.json.
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

from benchmarks.features.rows import Row, as_json, from_json
from benchmarks.features.scenarios import SCENARIOS, Scale
from benchmarks.report import RESULTS, save

_PATH: Final = RESULTS / "features.json"


def table(rows: list[Row]) -> Table:
    """What was found."""
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
    """0: every answer was the undisturbed one, where it must be."""
    parser = argparse.ArgumentParser(prog="make test-features", description=__doc__)
    parser.add_argument("features", nargs="*", metavar="|".join(SCENARIOS), help="default: all")
    parser.add_argument("--streams", type=int, default=Scale().streams, help="a row (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep what features.json has that is right")
    options = parser.parse_args()
    if unknown := set(options.features) - SCENARIOS.keys():
        parser.error(f"no feature {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    # So that a run that is ended takes its fleet along, as with Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asked = options.features or list(SCENARIOS)
    # By scenario; of others than were asked for, too.
    found = _measured(options.streams) if options.resume else {}
    with tempfile.TemporaryDirectory(prefix="tailrace-features-") as folder:
        for name in asked:
            if name in found:
                continue
            begun, found[name] = time.monotonic(), []
            for row in SCENARIOS[name](Scale(streams=options.streams), Path(folder)):
                found[name].append(row)
                print(f"{row.feature}, {row.sampling}: {row.equal} of {row.streams} equal", flush=True)
                _save(options.streams, found, begun=name)
            _save(options.streams, found)
            seconds = time.monotonic() - begun
            print(
                f"[{sum(each in found for each in asked)}/{len(asked)}] {name}: {seconds:.0f} s", flush=True
            )
    rows = [row for name in asked for row in found[name]]
    Console().print(table(rows))
    for row in rows:
        for reason in sorted(set(row.failed)):
            print(f"not moved at first ({row.feature}): {reason}", file=sys.stderr)
    print(f"{sum(row.right for row in rows)} of {len(rows)} rows are right; {_PATH}")
    return 0 if all(row.right for row in rows) else 1


def _save(streams: int, found: Mapping[str, list[Row]], begun: str = "") -> None:
    """`begun`: the scenario that has not all of its rows yet."""
    scenarios = {name: as_json(found[name]) for name in SCENARIOS if name in found}
    save("features", {"streams": streams, "begun": begun, "scenarios": scenarios})


def _measured(streams: int) -> dict[str, list[Row]]:
    """Scenarios that an earlier run found right, with as many streams."""
    before = json.loads(_PATH.read_text()) if _PATH.exists() else {}
    if before.get("streams") != streams:
        return {}
    whole = {name: rows for name, rows in before["scenarios"].items() if name != before["begun"]}
    found = {name: from_json(rows) for name, rows in whole.items()}
    return {name: rows for name, rows in found.items() if all(row.right for row in rows)}


if __name__ == "__main__":
    sys.exit(main())
