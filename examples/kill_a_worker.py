"""Migrate an answer while it streams, then kill -9 the worker that has it, and show that it is the same
answer.

    make up
    .venv/bin/python -m examples.kill_a_worker [--svg FILE]

The text is coloured by the instance that generated it. Exits with 1 if the answer differs from that of the
same request undisturbed. The killed worker is restarted at the end.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from openai import OpenAI
from rich.console import Console
from rich.text import Text

from examples.fleet import (
    Chat,
    Fleet,
    Once,
    exit_on_connection_error,
    local_url,
    signal_part,
    stream_chat,
)
from tailrace.cli.admin import connect
from tailrace.cli.tables import copied_text
from tailrace.local.restart import find_parts
from tailrace.local.state import Part, find_state
from tailrace.tiny.task import task
from tailrace.v1 import types_pb2

PROMPT: Final = task("wxyz", 120, 120).prompt
# At least so many tokens, of whatever model.
TOKENS: Final = 2_000
SAMPLING: Final = {"temperature": 0.0, "max_tokens": 3_000, "extra_body": {"min_tokens": TOKENS}}
# Shares of the answer's tokens after which it is moved, and its worker killed.
MOVE_AT: Final = 0.3
KILL_AT: Final = 0.6
# On a busy machine, an answer can end before its worker is killed.
TRIES: Final = 3
_COLOURS: Final = ("cyan", "green", "magenta", "yellow", "blue", "red")
_COLUMNS: Final = 100


class Recording:
    """What the client saw: each piece of text with the instance that had the request, and the longest gap."""

    def __init__(self, instances: list[str]) -> None:
        self._colours = {name: _COLOURS[n % len(_COLOURS)] for n, name in enumerate(instances)}
        # Instance and what came from it, in turn.
        self._pieces: list[tuple[str, str]] = []
        self.here = ""
        self.longest_gap_s = 0.0
        self._shown = 0
        self._last_s = 0.0

    def add(self, chat: Chat) -> None:
        """Add what has arrived since the last call."""
        now_s = time.monotonic()
        if self._last_s:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_s)
        self._last_s = now_s
        whole = f"{chat.reasoning}\n\n{chat.answer}" if chat.answer else chat.reasoning
        new = whole[self._shown :]
        if self._pieces and self._pieces[-1][0] == self.here:
            new = self._pieces.pop()[1] + new
        self._pieces.append((self.here, new))
        self._shown = len(whole)

    def text(self, colours: bool) -> Text:
        """Return the whole text in the instances' colours, on few lines so that it can be seen at once.

        Without `colours`, each instance's part is on a line of its own, after its name.
        """
        if not colours:
            return Text("\n".join(f"[{name}] " + piece.replace("\n", " ") for name, piece in self._pieces))
        return Text.assemble(
            *((piece.replace("\n", " "), self._colours.get(name, "white")) for name, piece in self._pieces)
        )

    def name(self, instance: str) -> str:
        """Return the instance in its colour, as rich markup."""
        return f"[{self._colours.get(instance, 'white')}]{instance}[/]"


def main() -> int:
    """Return 0 if the answer equals the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", default=local_url(), help="OpenAI API (default: the local cluster's)")
    parser.add_argument("--svg", type=Path, help="leave a picture of what was printed here")
    options = parser.parse_args()
    with exit_on_connection_error(options.url), connect(None) as admin:
        return run(options.url, options.svg, Fleet(admin.stub))


def run(url: str, svg: Path | None, fleet: Fleet) -> int:
    """Send the request twice, undisturbed and disturbed; return 0 if both answers are equal."""
    console = Console(record=svg is not None, width=_COLUMNS if svg is not None else None, highlight=False)
    client = OpenAI(base_url=url, api_key="none", timeout=120)
    model = client.models.list().data[0].id
    console.print(f"[bold]$ python -m examples.kill_a_worker[/]\ninstances: {', '.join(fleet.instances())}")
    alone = stream_chat(client, model, PROMPT, SAMPLING)
    console.print(f"the answer, undisturbed: {alone.completion_tokens} tokens; now the same request again")
    for _ in range(TRIES):
        disturbed = Disturbed(console, fleet, alone)
        chat = stream_chat(client, model, PROMPT, SAMPLING, on_progress=disturbed.watch)
        disturbed.once.join()
        if disturbed.killed:
            break
        console.print("the answer ended before its worker could be killed: once more")
    equal = chat.same_text_and_usage(alone)
    console.print()
    console.print(disturbed.recording.text(colours=console.is_terminal or svg is not None))
    console.print(
        f"\nlongest gap between two pieces of text: {disturbed.recording.longest_gap_s:.2f} s; "
        f"text and usage equal to the undisturbed answer: [bold]{'yes' if equal else 'NO'}[/]"
    )
    if svg is not None:
        picture = console.export_svg(title="an answer that outlives its worker")
        # Without the fonts that it would load from elsewhere; a viewer has a monospaced one.
        svg.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))
    for name in disturbed.killed:
        console.print(f"\nrestarting {name}, so that the cluster is as before:")
        subprocess.run([sys.executable, "-m", "tailrace", "restart", name], check=True, timeout=300)
    return 0 if equal and disturbed.killed else 1


class Disturbed:
    """One answer that is moved while it streams, and whose worker is then killed."""

    def __init__(self, console: Console, fleet: Fleet, alone: Chat) -> None:
        """`alone` is the undisturbed answer."""
        self.recording = Recording(fleet.instances())
        self.once = Once()
        self.killed: list[str] = []
        self._console = console
        self._fleet = fleet
        self._length = len(alone.reasoning) + len(alone.answer)
        self._moved = threading.Event()

    def watch(self, chat: Chat) -> None:
        """Record what has arrived; move and kill in due time."""
        self.recording.here = self.recording.here or self._where(chat)
        self.recording.add(chat)
        length = len(chat.reasoning) + len(chat.answer)
        self.once.when("move", length > MOVE_AT * self._length, lambda: self._move(chat))
        self.once.when("kill", length > KILL_AT * self._length, lambda: self._kill(chat))

    def _where(self, chat: Chat) -> str:
        request = self._fleet.find(chat.request_id)
        return request.instance_id if request is not None else ""

    def _move(self, chat: Chat) -> None:
        name = self.recording.name
        source = self._where(chat)
        target = next(each for each in self._fleet.instances() if each != source)
        record = self._fleet.migrate(chat.request_id, target)
        if record.state == types_pb2.MIGRATION_STATE_COMMITTED:
            self.recording.here = target
            self._console.print(
                f"migrated {name(source)} -> {name(target)} with its KV cache: "
                f"{copied_text(record)}, paused {record.pause_ms:.0f} ms"
            )
        else:
            self._console.print(f"the migration was aborted: {record.error}")
        self._moved.set()

    def _kill(self, chat: Chat) -> None:
        self._moved.wait(timeout=30)
        name = self._where(chat)
        if not name:
            return
        signal_part(part_of(name), signal.SIGKILL)
        self.killed.append(name)
        self._console.print(f"[bold red]kill -9[/] {self.recording.name(name)}")
        deadline_s = time.monotonic() + 30
        while (now := self._where(chat)) in ("", name) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self.recording.here = now
        self._console.print(f"recomputed on {self.recording.name(now)} from the tokens that the client has")


def part_of(name: str) -> Part:
    """Return a process of the local cluster. Raise SystemExit if there is none of that name."""
    state = find_state()
    parts = find_parts(state) if state is not None else {}
    if name not in parts:
        sys.exit(f"{name} is not a process of the local cluster of this folder: `make up` starts one")
    return parts[name]


if __name__ == "__main__":
    sys.exit(main())
