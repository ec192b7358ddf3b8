"""Restart every process of the local cluster, one after another, under load: no client may see an error.

    tailrace up --frontends 2
    .venv/bin/python -m examples.rolling_restart            # SIGTERM, as `systemctl restart` does
    .venv/bin/python -m examples.rolling_restart --kill     # kill -9

Fifty clients stream one chat after the other, each over a connection of its own, and never try anything
again. Each answer is compared with the one that the same request gave before anything was restarted. Two
front ends share the HTTP port, so that new requests find one while the other is restarted. A front end that
is killed takes the streams that it carries with it; no other stream may break.

Prints a row for each process; exits 1 when an answer differs, or a request failed that must not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from openai import OpenAI

from examples.fifty_streams import run_all, variants
from examples.fleet import Chat, kill_part, local_url, stream_chat, told_plainly
from tailrace.local.plan import Tier
from tailrace.local.process import PartFailed
from tailrace.local.progress import PlainProgress, Step
from tailrace.local.restart import Restarter, find_parts
from tailrace.local.state import RunFolder, RunFolderBusy, RunFolderUnusable, RunState

Work = Sequence[tuple[str, dict[str, object]]]

_STREAM_S = 600.0
# Until every stream flows again after a restart, before the next one.
_FLOW_S = 120.0
_ADOPTIONS = "tailrace_frontend_adoptions_total"
_RECOVERIES = "tailrace_frontend_recoveries_total"
_STREAMS = "tailrace_frontend_streams"
_HEAD = (
    *("process", "until exit, s", "until in use, s"),
    *("streams", "finished", "migrated", "recomputed", "errors", "different"),
)


def direct_client(url: str) -> OpenAI:
    """A client that connects anew for each request, and tries nothing twice."""
    once = {"Connection": "close"}
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=_STREAM_S, default_headers=once)


@dataclass
class Tally:
    """What became of the requests that ended in some time."""

    finished: int = 0
    different: int = 0
    errors: list[str] = field(default_factory=list)


class Load:
    """One thread a client: its request over and over, each answer compared, until it is left."""

    def __init__(self, client: OpenAI, model: str, work: Work, expected: Sequence[Chat]) -> None:
        self._client = client
        self._model = model
        self._lock = threading.Lock()
        self._tally = Tally()
        self._stop = threading.Event()
        # Of each client: whether a token of its present request has come.
        self._flows = [False] * len(work)
        self._threads = [
            threading.Thread(target=self._run, args=(number, *asked, answer), daemon=True)
            for number, (asked, answer) in enumerate(zip(work, expected, strict=True))
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
        """How many there are."""
        return len(self._threads)

    def take(self) -> Tally:
        """What ended since this was last asked."""
        with self._lock:
            tally, self._tally = self._tally, Tally()
        return tally

    def wait_flowing(self) -> int:
        """Until nearly every client has a stream that flows; how many have."""
        until_s = time.monotonic() + _FLOW_S
        while (flowing := sum(self._flows)) < 0.9 * len(self._flows) and time.monotonic() < until_s:
            time.sleep(0.01)
        return flowing

    def _run(self, number: int, prompt: str, options: dict[str, object], expected: Chat) -> None:
        def flows(chat: Chat) -> None:
            self._flows[number] = True

        while not self._stop.is_set():
            self._flows[number] = False
            try:
                chat = stream_chat(self._client, self._model, prompt, options, flows)
            except Exception as error:  # noqa: BLE001 - whatever a client can see counts
                self._note(error=f"{type(error).__name__}: {error}")
                # Whoever is refused at once would be counted a hundred times a second.
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
    # Clients; those whose stream flowed when it was told to stop; those whose stream a front end carried that
    # was killed.
    clients: int
    streams: int
    own: int
    tally: Tally
    moved: int
    recomputed: int

    @property
    def allowed(self) -> int:
        """Errors that may be: when a front end is killed, of its own streams and of requests on their way to
        it."""
        return self.own + self.clients - self.streams if self.own else 0


class Counters:
    """What front ends count, over restarts of them."""

    def __init__(self, state: RunState) -> None:
        self._addresses = {
            part.name: _after(part.spec.command, "--metrics")
            for part in state.parts
            if part.tier == Tier.FRONTEND and part.spec is not None
        }

    def read(self, metric: str) -> dict[str, float]:
        """A metric's sum over its labels, by front end."""
        return {name: sum(_samples(address, metric)) for name, address in self._addresses.items()}


def _after(command: Sequence[str], flag: str) -> str:
    return command[list(command).index(flag) + 1]


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


def grown(before: dict[str, float], after: dict[str, float]) -> int:
    """How much counters grew in sum; those of one that was restarted began at nothing."""
    total = 0.0
    for name, now in after.items():
        was = before.get(name, 0.0)
        total += now - was if was <= now else now
    return int(total)


class Campaign:
    """Restarts parts under a load, and keeps the rows."""

    def __init__(
        self, folder: RunFolder, state: RunState, counters: Counters, load: Load, kill: bool
    ) -> None:
        self._restarter = Restarter(folder, state, _Silent())
        self._state = state
        self._counters = counters
        self._load = load
        self._kill = kill

    def restart(self, name: str) -> Row:
        """Restart one part while all clients stream. Raises PartFailed."""
        part = find_parts(self._state)[name]
        streams = self._load.wait_flowing()
        self._load.take()
        before = {metric: self._counters.read(metric) for metric in (_ADOPTIONS, _RECOVERIES)}
        own = 0
        if self._kill:
            own = int(self._counters.read(_STREAMS).get(name, 0.0)) if part.tier == Tier.FRONTEND else 0
            kill_part(part)
        took = asyncio.run(self._restarter.restart(name))
        # What was under way when it ended must end well, too.
        self._load.wait_flowing()
        after = {metric: self._counters.read(metric) for metric in before}
        return Row(
            name=name,
            stopping_s=took.stopping_s,
            starting_s=took.starting_s,
            clients=self._load.clients,
            streams=streams,
            own=own,
            tally=self._load.take(),
            moved=grown(before[_ADOPTIONS], after[_ADOPTIONS]),
            recomputed=grown(before[_RECOVERIES], after[_RECOVERIES]),
        )


class _Silent(PlainProgress):
    def show(self, name: str, step: Step) -> None:
        """The table tells it."""


def line(cells: Iterable[object]) -> str:
    """A row of the table, as Markdown."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def shown(row: Row) -> str:
    """One restart as a row of the table."""
    errors = str(len(row.tally.errors))
    if row.own:
        errors += f" (it carried {row.own})"
    seconds = (f"{row.stopping_s:.1f}", f"{row.starting_s:.1f}")
    counts = (row.streams, row.tally.finished, row.moved, row.recomputed, errors, row.tally.different)
    return line((row.name, *seconds, *counts))


def run(folder: RunFolder, state: RunState, names: Sequence[str], work: Work, kill: bool) -> list[Row]:
    """Restart these parts under this work; prints and returns the rows. Raises PartFailed."""
    client, model = direct_client(f"{state.http}/v1"), state.model
    print(f"{len(work)} streams, undisturbed ...", flush=True)
    expected = run_all(client, model, list(work))
    print(f"  {sum(chat.completion_tokens for chat in expected):,} tokens")
    how = "killed" if kill else "told to stop"
    print(f"the same repeatedly, while each process is {how} and restarted:\n")
    print(line(_HEAD), line("---" for _ in _HEAD), sep="\n", flush=True)
    rows: list[Row] = []
    with Load(client, model, work, expected) as load:
        campaign = Campaign(folder, state, Counters(state), load, kill)
        for name in names:
            rows.append(campaign.restart(name))
            print(shown(rows[-1]), flush=True)
    # What was still under way has ended since; it belongs to nothing that was restarted.
    last = load.take()
    rows.append(Row("(after it)", 0.0, 0.0, len(work), len(work), 0, last, 0, 0))
    print(shown(rows[-1]))
    return rows


def failed(rows: Sequence[Row]) -> bool:
    """Whether a client saw what it must not."""
    return any(len(row.tally.errors) > row.allowed or row.tally.different for row in rows)


@contextmanager
def local_cluster() -> Iterator[tuple[RunFolder, RunState]]:
    """The one of this folder, held for the block; ends the script with a line when there is none."""
    folder = RunFolder.default()
    try:
        with folder.locked():
            state = folder.read()
            if state is None or not state.ready:
                sys.exit("no local cluster runs here: tailrace up --frontends 2 starts one")
            yield folder, state
    except (RunFolderBusy, RunFolderUnusable, PartFailed) as problem:
        sys.exit(str(problem))


def main() -> int:
    """Restart everything once; 0 when no client noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="processes to restart (default: all)")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--kill", action="store_true", help="kill -9 instead of SIGTERM")
    options = parser.parse_args()
    with told_plainly(local_url()), local_cluster() as (folder, state):
        names = options.names or list(find_parts(state))
        rows = run(folder, state, names, variants(options.streams), options.kill)
    for error in itertools.islice((error for row in rows for error in row.tally.errors), 10):
        print(f"  {error}")
    tallies = [row.tally for row in rows]
    finished, different = sum(each.finished for each in tallies), sum(each.different for each in tallies)
    print(f"\n{finished} answers, {different} different; {sum(len(each.errors) for each in tallies)} errors")
    return 1 if failed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
