"""`make test-clients`: real clients against a fleet whose requests move, and against plain `vllm serve`.

Each client is installed into build/clients/NAME and runs once against each server. On the fleet each of its
running requests is migrated again and again, and one worker is killed. Figures in
benchmarks/results/clients.json.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from tests.clients.client import Client, ClientError, Run
from tests.clients.clients import CLIENTS
from tests.clients.fleets import WORKERS, make_model, plain_server, run_fleet
from tests.clients.moving import Mover
from tests.clients.rows import Row
from tests.harness.forked import end_servers
from tests.harness.report import RESULTS, print_json, save, table_console

_PATH: Final = RESULTS / "clients.json"
_TABLE_WIDTH: Final = 150


def table(rows: Sequence[Row]) -> Table:
    """Return the results as a table."""
    shown = Table(box=None, header_style="bold")
    for heading in ("CLIENT", "VERSION"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("REQUESTS", "ERRORS", "MOVED", "MOVES", "KILLS", "HIT", "COMPARED"):
        shown.add_column(heading, justify="right")
    shown.add_column("AGAINST VLLM SERVE")
    for row in rows:
        differences = row.differences()
        verdict = row.failed or "; ".join(f"{name} differs" for name in differences) or "equal"
        figures = (
            row.moved.requests if row.moved else "",
            len(row.moved.errors) if row.moved else "",
            row.moved_requests,
            row.moves,
            row.kills,
            row.interrupted,
            row.compared,
        )
        shown.add_row(row.client, row.version, *map(str, figures), verdict)
    return shown


class Results:
    """The rows so far, saved after each step, so that an interrupted run can be resumed."""

    def __init__(self, resume: bool) -> None:
        saved = json.loads(_PATH.read_text())["rows"] if resume and _PATH.exists() else []
        self.rows = {row["client"]: Row.from_json(row) for row in saved}

    def prepare(self, client: Client) -> Row:
        """Return the client's row; a new one if it failed or is another version's."""
        row = self.rows.get(client.name)
        if row is None or row.version != client.version or row.failed:
            row = Row(client.name, client.version, list(client.known))
        elif not row.passed:
            row.moved = None
        self.rows[client.name] = row
        return row

    def save(self) -> None:
        """Write the file."""
        save("clients", {"rows": [self.rows[name].as_json() for name in CLIENTS if name in self.rows]})


def _report(client: Client, step: str, started_s: float, row: Row) -> None:
    seconds = time.monotonic() - started_s
    print(f"{client.name}, {step}: {row.failed or 'done'}, {seconds:.0f} s", file=sys.stderr, flush=True)


def _run_plain(selected: Sequence[tuple[Client, Row]], results: Results, folder: Path, model: str) -> None:
    """Run the clients against plain `vllm serve`."""
    with plain_server(*make_model(model, folder)) as server:
        for client, row in selected:
            started = time.monotonic()
            try:
                row.plain = client.run(client, Run(server.url, _make_folder(folder / "plain" / client.name)))
            except ClientError as error:
                row.failed = f"vllm serve: {error}"
            _report(client, "vllm serve", started, row)
            results.save()


def _run_moved(selected: Sequence[tuple[Client, Row]], results: Results, folder: Path, model: str) -> None:
    """Run the clients against the fleet."""
    with run_fleet(_make_folder(folder / f"fleet-{model}"), *make_model(model, folder)) as fleet:
        for client, row in selected:
            started = time.monotonic()
            fleet.repair()
            fleet.wait_instances(WORKERS)
            try:
                with Mover(fleet) as mover:
                    run = Run(fleet.http, _make_folder(folder / "moved" / client.name))
                    outcome = client.run(client, run)
                row.add(outcome, mover.done)
            except ClientError as error:
                row.failed = f"fleet: {error}"
            _report(client, "fleet", started, row)
            results.save()


def _make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _install(selected: Mapping[str, Client], results: Results) -> list[tuple[Client, Row]]:
    """Return the installed ones, with their rows."""
    installed = []
    for client in selected.values():
        row, started = results.prepare(client), time.monotonic()
        try:
            client.install()
        except ClientError as error:
            row.failed = f"install: {error}"
        else:
            installed.append((client, row))
        _report(client, "install", started, row)
    results.save()
    return installed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the clients; return 0 if none sees a difference."""
    parser = argparse.ArgumentParser(prog="make test-clients", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="|".join(CLIENTS), help="default: all")
    parser.add_argument("--resume", action="store_true", help="keep what clients.json has")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if unknown := set(options.clients) - CLIENTS.keys():
        parser.error(f"unknown client {', '.join(sorted(unknown))}; choose from {', '.join(CLIENTS)}")
    # Stop the servers on SIGTERM, as on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    selected = {name: CLIENTS[name] for name in options.clients or CLIENTS}
    results = Results(options.resume)
    try:
        installed = _install(selected, results)
        with tempfile.TemporaryDirectory(prefix="tailrace-clients-") as folder:
            for model in ("tiny", "scripted"):
                served = [(client, row) for client, row in installed if client.model == model]
                if plain := [(client, row) for client, row in served if row.plain is None]:
                    _run_plain(plain, results, Path(folder), model)
                if moved := [(client, row) for client, row in served if not row.moved and not row.failed]:
                    _run_moved(moved, results, Path(folder), model)
    finally:
        end_servers()
    rows = [results.rows[name] for name in selected]
    if options.output == "json":
        print_json("clients", {"rows": [row.as_json() for row in rows]})
    else:
        table_console(_TABLE_WIDTH).print(table(rows))
        for row in rows:
            for name, difference in row.differences().items():
                print(f"{row.client}, {name}: {difference}", file=sys.stderr)
    print(f"{sum(row.passed for row in rows)} of {len(rows)} clients equal; {_PATH}", file=sys.stderr)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
