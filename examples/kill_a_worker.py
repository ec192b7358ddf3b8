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
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from openai import OpenAI
from rich.console import Console
from rich.text import Text

from examples.fleet import Chat, Fleet, Once, exit_on_connection_error, kill_part, local_url, stream_chat
from tailrace.cli.admin import connect
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

    def text(self) -> Text:
        """Return the whole text in the instances' colours, on few lines so that it can be seen at once."""
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
    recording = Recording(fleet.instances())
    console.print(f"[bold]$ python -m examples.kill_a_worker[/]\ninstances: {', '.join(fleet.instances())}")
    alone = stream_chat(client, model, PROMPT, SAMPLING)
    console.print(f"the answer, undisturbed: {alone.completion_tokens} tokens; now the same request again")
    length = len(alone.reasoning) + len(alone.answer)
    once = Once()
    moved = threading.Event()
    killed: list[str] = []

    def where(chat: Chat) -> str:
        request = fleet.find(chat.request_id)
        return request.instance_id if request is not None else ""

    def move(chat: Chat) -> None:
        source = where(chat)
        target = next(name for name in fleet.instances() if name != source)
        record = fleet.migrate(chat.request_id, target)
        if record.state == types_pb2.MIGRATION_STATE_COMMITTED:
            recording.here = target
            console.print(
                f"migrated {recording.name(source)} -> {recording.name(target)} with its KV cache: "
                f"{record.bytes / 2**20:.1f} MiB, paused {record.pause_ms:.0f} ms"
            )
        else:
            console.print(f"the migration was aborted: {record.error}")
        moved.set()

    def kill(chat: Chat) -> None:
        moved.wait(timeout=30)
        name = where(chat)
        kill_part(part_of(name))
        killed.append(name)
        console.print(f"[bold red]kill -9[/] {recording.name(name)}")
        deadline_s = time.monotonic() + 30
        while (now := where(chat)) in ("", name) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        recording.here = now
        console.print(f"recomputed on {recording.name(now)} from the tokens that the client has")

    def watch(chat: Chat) -> None:
        recording.here = recording.here or where(chat)
        recording.add(chat)
        length_now = len(chat.reasoning) + len(chat.answer)
        once.when("move", length_now > MOVE_AT * length, lambda: move(chat))
        once.when("kill", length_now > KILL_AT * length, lambda: kill(chat))

    disturbed = stream_chat(client, model, PROMPT, SAMPLING, on_progress=watch)
    once.join()
    equal = disturbed.same_text_and_usage(alone)
    console.print()
    console.print(recording.text())
    console.print(
        f"\nlongest gap between two pieces of text: {recording.longest_gap_s:.2f} s; "
        f"text and usage equal to the undisturbed answer: [bold]{'yes' if equal else 'NO'}[/]"
    )
    if svg is not None:
        picture = console.export_svg(title="an answer that outlives its worker")
        # Without the fonts that it would load from elsewhere; a viewer has a monospaced one.
        svg.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))
    for name in killed:
        subprocess.run([sys.executable, "-m", "tailrace", "restart", name], check=True, timeout=300)
    return 0 if equal and killed else 1


def part_of(name: str) -> Part:
    """Return a process of the local cluster. Raise SystemExit if there is none of that name."""
    state = find_state()
    parts = find_parts(state) if state is not None else {}
    if name not in parts:
        sys.exit(f"{name} is not a process of the local cluster of this folder: `make up` starts one")
    return parts[name]


if __name__ == "__main__":
    sys.exit(main())
