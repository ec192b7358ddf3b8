"""`make test-features`: features of vLLM's API on two real workers, each stream moved and compared.

For each: how many streams there were, how many moves were live and how many by replay, and how many answers
were those of the same stream undisturbed. Figures in benchmarks/results/features.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.features.rows import Row, as_json
from benchmarks.features.scenarios import SCENARIOS, Scale
from benchmarks.report import save


def table(rows: list[Row]) -> Table:
    """What was found."""
    shown = Table(box=None, header_style="bold")
    for heading in ("FEATURE", "SAMPLING", "STREAMS", "EQUAL", "LIVE", "REPLAYED", "MOVED TWICE", "NOTE"):
        shown.add_column(heading, justify="left" if heading in ("FEATURE", "SAMPLING", "NOTE") else "right")
    for row in rows:
        note = "; ".join(filter(None, [row.note, *sorted(row.way_reasons)]))
        figures = (row.streams, row.equal, row.live, row.replayed, row.moved_twice)
        shown.add_row(row.feature, row.sampling, *map(str, figures), note)
    return shown


def main() -> int:
    """0: every answer was the undisturbed one, where it must be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.features", description=__doc__)
    parser.add_argument("features", nargs="*", metavar="|".join(SCENARIOS), help="default: all")
    parser.add_argument("--streams", type=int, default=Scale().streams, help="a row (default: %(default)s)")
    options = parser.parse_args()
    if unknown := set(options.features) - SCENARIOS.keys():
        parser.error(f"no feature {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tailrace-features-") as folder:
        for name in options.features or SCENARIOS:
            for row in SCENARIOS[name](Scale(streams=options.streams), Path(folder)):
                rows.append(row)
                print(f"{row.feature}, {row.sampling}: {row.equal} of {row.streams} equal", flush=True)
    Console().print(table(rows))
    for row in rows:
        for reason in sorted(set(row.failed)):
            print(f"not moved at first ({row.feature}): {reason}", file=sys.stderr)
    save("features", {"rows": as_json(rows)})
    return 0 if all(row.right or row.may_differ for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
