"""Restart every process of the local cluster, one after another, under load: no client may see an error.

    tailrace up --frontends 2 --front python
    .venv/bin/python -m examples.rolling_restart            # SIGTERM, as `systemctl restart` does
    .venv/bin/python -m examples.rolling_restart --kill     # kill -9

Fifty clients stream one chat after another, each over a new connection, and never retry. Each answer is
compared with the one that the same request got before anything was restarted. Two front ends share the HTTP
port, so that new requests find one while the other is restarted. A front end that is killed takes its own
streams with it; no other stream may break.

Prints a row for each process. Exits with 1 if an answer differs, or a request failed that must not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil
from openai import OpenAI

from examples.fifty_streams import run_all, variants
from examples.fleet import Chat, exit_on_connection_error, local_url, signal_part, stream_chat
from tailrace.local.plan import Tier
from tailrace.local.process import PartFailed
from tailrace.local.progress import Progress, Step
from tailrace.local.restart import Restarter, find_parts
from tailrace.local.state import Part, RunFolder, RunFolderBusy, RunFolderUnusable, RunState

Work = Sequence[tuple[str, dict[str, object]]]

_STREAM_S = 600.0
# Time for streams to flow again after a restart, before the next one.
_FLOW_S = 120.0
_ADOPTIONS = "tailrace_frontend_adoptions_total"
_RECOVERIES = "tailrace_frontend_recoveries_total"
_HEAD = (
    *("process", "until exit, s", "until in use, s"),
    *("streams", "finished", "migrated", "recomputed", "errors", "different"),
)


def direct_client(url: str) -> OpenAI:
    """Return a client that uses a new connection for each request, and never retries."""
    once = {"Connection": "close"}
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=_STREAM_S, default_headers=once)


@dataclass
class Tally:
    """The requests that ended during some period."""

    finished: int = 0
    different: int = 0
    errors: list[str] = field(default_factory=list)


class Load:
    """Clients, one thread each, that repeat their request and compare each answer, until the block ends."""

    def __init__(self, client: OpenAI, model: str, work: Work, expected: Sequence[Chat]) -> None:
        self._client = client
        self._model = model
        self._lock = threading.Lock()
        self._tally = Tally()
        self._stop = threading.Event()
        # By client: whether its current request has a token.
        self._flows = [False] * len(work)
        self._threads = [
            threading.Thread(target=self._run, args=(number, *item, answer), daemon=True)
            for number, (item, answer) in enumerate(zip(work, expected, strict=True))
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_STREAM_S)

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self._threads)

    def take(self) -> Tally:
        """Return the tally since the last call."""
        with self._lock:
            tally, self._tally = self._tally, Tally()
        return tally

    @property
    def streams(self) -> int:
        """Return how many clients' streams have a token."""
        return sum(self._flows)

    def wait_flowing(self) -> None:
        """Wait until nearly every client's stream has a token."""
        until_s = time.monotonic() + _FLOW_S
        while self.streams < 0.9 * self.clients and time.monotonic() < until_s:
            time.sleep(0.01)

    def _run(self, number: int, prompt: str, options: dict[str, object], expected: Chat) -> None:
        def flows(chat: Chat) -> None:
            self._flows[number] = True

        while not self._stop.is_set():
            self._flows[number] = False
            try:
                chat = stream_chat(self._client, self._model, prompt, options, flows)
            except Exception as error:  # noqa: BLE001 - whatever a client can see counts
                self._note(error=f"{type(error).__name__}: {error}")
                # A client that is refused at once would otherwise be counted a hundred times a second.
                self._stop.wait(0.5)
            else:
                self._note(different=not chat.same_text_and_usage(expected))

    def _note(self, error: str = "", different: bool = False) -> None:
        with self._lock:
            if error:
                self._tally.errors.append(error)
            else:
                self._tally.finished += 1
                self._tally.different += different


@dataclass(frozen=True)
class Row:
    """One restart."""

    name: str
    stopping_s: float
    starting_s: float
    # Number of clients; of those whose stream flowed when the restart began; and, if a front end was killed,
    # of those connected to it.
    clients: int
    streams: int
    own: int
    tally: Tally
    moved: int
    recomputed: int

    @property
    def allowed(self) -> int:
        """Return the number of errors allowed: if a front end was killed, its streams and the requests on
        their way to it."""
        return self.own + self.clients - self.streams if self.own else 0


class Counters:
    """The front ends' counters, across restarts."""

    def __init__(self, state: RunState) -> None:
        self._addresses = {
            part.name: part.spec.option("--metrics") for part in state.parts if part.tier is Tier.FRONTEND
        }

    def read(self, metric: str) -> dict[str, float]:
        """Return a metric's sum over its labels, by front end."""
        return {name: sum(_samples(address, metric)) for name, address in self._addresses.items()}


def open_connections(part: Part, url: str) -> int:
    """Count the clients that are connected to a front end.

    They may be more than its streams: a busy API server still sends answers that its front end has in full.
    """
    port = urlsplit(url).port
    connections = [
        connection
        for pid in part.identity.session_members()
        for connection in psutil.Process(pid).net_connections("tcp")
    ]
    return sum(
        connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
        for connection in connections
    )


def _samples(address: str, metric: str) -> Iterator[float]:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
    except OSError:
        return
    for line in lines:
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == metric:
            yield float(value)


def increase(before: dict[str, float], after: dict[str, float]) -> int:
    """Return the total increase of counters; those of a restarted front end began at 0."""
    total = 0.0
    for name, now in after.items():
        previous = before.get(name, 0.0)
        total += now - previous if previous <= now else now
    return int(total)


class Campaign:
    """Restart processes under a load, and count what clients notice."""

    def __init__(
        self, folder: RunFolder, state: RunState, counters: Counters, load: Load, kill: bool
    ) -> None:
        self._restarter = Restarter(folder, state, _Silent())
        self._state = state
        self._counters = counters
        self._load = load
        self._kill = kill

    def restart(self, name: str) -> Row:
        """Restart one process while all clients stream. Raise PartFailed."""
        part = find_parts(self._state)[name]
        self._load.wait_flowing()
        self._load.take()
        before = {metric: self._counters.read(metric) for metric in (_ADOPTIONS, _RECOVERIES)}
        streams, own = self._load.streams, 0
        if self._kill:
            try:
                if part.tier is Tier.FRONTEND:
                    # Its streams must not end, nor others begin, while they are counted.
                    signal_part(part, signal.SIGSTOP)
                    own = open_connections(part, self._state.http)
            finally:
                signal_part(part, signal.SIGKILL)
            # Until then, those that began anew could be on their way to it. A client that has lost its stream
            # still counts: it waits before it begins again.
            streams = self._load.streams
        durations = asyncio.run(self._restarter.restart(name))
        # Requests in progress when it exited must end correctly, too.
        self._load.wait_flowing()
        after = {metric: self._counters.read(metric) for metric in before}
        return Row(
            name=name,
            stopping_s=durations.stopping_s,
            starting_s=durations.starting_s,
            clients=self._load.clients,
            streams=streams,
            own=own,
            tally=self._load.take(),
            moved=increase(before[_ADOPTIONS], after[_ADOPTIONS]),
            recomputed=increase(before[_RECOVERIES], after[_RECOVERIES]),
        )


class _Silent(Progress):
    def show(self, name: str, step: Step) -> None:
        """Show nothing: the table has it."""


def markdown_row(cells: Iterable[object]) -> str:
    """Return a row of the table, as Markdown."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def format_row(row: Row) -> str:
    """Return one restart as a row of the table."""
    errors = str(len(row.tally.errors))
    if row.own:
        errors += f" (it carried {row.own})"
    seconds = (f"{row.stopping_s:.1f}", f"{row.starting_s:.1f}")
    counts = (row.streams, row.tally.finished, row.moved, row.recomputed, errors, row.tally.different)
    return markdown_row((row.name, *seconds, *counts))


def run(folder: RunFolder, state: RunState, names: Sequence[str], work: Work, kill: bool) -> list[Row]:
    """Restart these processes under this load; print and return the rows. Raise PartFailed."""
    client, model = direct_client(f"{state.http}/v1"), state.model
    print(f"{len(work)} streams, undisturbed ...", flush=True)
    expected = run_all(client, model, list(work))
    print(f"  {sum(chat.completion_tokens for chat in expected):,} tokens")
    how = "killed" if kill else "stopped"
    print(f"the same repeatedly, while each process is {how} and restarted:\n")
    print(markdown_row(_HEAD), markdown_row("---" for _ in _HEAD), sep="\n", flush=True)
    rows: list[Row] = []
    with Load(client, model, work, expected) as load:
        campaign = Campaign(folder, state, Counters(state), load, kill)
        for name in names:
            rows.append(campaign.restart(name))
            print(format_row(rows[-1]), flush=True)
    # Requests that ended since then belong to no restart.
    last = load.take()
    rows.append(Row("(after it)", 0.0, 0.0, len(work), len(work), 0, last, 0, 0))
    print(format_row(rows[-1]))
    for row in rows:
        for text, count in Counter(row.tally.errors).most_common():
            print(f"{row.name}: {count} x {text}")
    return rows


def failed(rows: Sequence[Row]) -> bool:
    """Return whether a client saw something that it must not."""
    return any(len(row.tally.errors) > row.allowed or row.tally.different for row in rows)


@contextmanager
def local_cluster() -> Iterator[tuple[RunFolder, RunState]]:
    """Yield this folder's local cluster, locked for the block; end the script with one line if there is
    none."""
    folder = RunFolder.default()
    try:
        with folder.locked():
            state = folder.read()
            if state is None or not state.ready:
                sys.exit("no local cluster runs here: tailrace up --frontends 2 --front python starts one")
            yield folder, state
    except (RunFolderBusy, RunFolderUnusable, PartFailed) as problem:
        sys.exit(str(problem))


def main() -> int:
    """Restart everything once; return 0 if no client noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="processes to restart (default: all)")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--kill", action="store_true", help="kill -9 instead of SIGTERM")
    options = parser.parse_args()
    with exit_on_connection_error(local_url()), local_cluster() as (folder, state):
        names = options.names or list(find_parts(state))
        rows = run(folder, state, names, variants(options.streams), options.kill)
    for error in itertools.islice((error for row in rows for error in row.tally.errors), 10):
        print(f"  {error}")
    tallies = [row.tally for row in rows]
    finished, different = sum(tally.finished for tally in tallies), sum(tally.different for tally in tallies)
    print(
        f"\n{finished} answers, {different} different; {sum(len(tally.errors) for tally in tallies)} errors"
    )
    return 1 if failed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
