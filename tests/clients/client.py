"""A client: where it comes from, how it is installed, and a command of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tailrace.tiny.task import task
from tests.clients.rows import Outcome
from tests.harness.servers import MODEL

ROOT: Final = Path(__file__).resolve().parents[2]
PROGRAMS: Final = Path(__file__).parent / "programs"
_RUN_S: Final = 900.0
_INSTALL_S: Final = 1200.0
# Characters of a client's output in an error.
_OUTPUT_CHARS: Final = 1500


class ClientError(Exception):
    """A client could not be installed, or did not run to its end; the message is its own last words."""


@dataclass(frozen=True, slots=True)
class Run:
    """Where a client runs: against which server, and in which folder of its own."""

    url: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Client:
    """A client, pinned."""

    name: str
    # What `pip install` or `npm install` is given.
    package: str
    run: Callable[[Client, Run], Outcome]
    source: Literal["pip", "npm", "here"] = "pip"
    # The model that is served: the shipped one, or the one that calls tools.
    model: Literal["tiny", "scripted"] = "tiny"
    # Pinned beside it.
    beside: Sequence[str] = ()
    # Results that differ, since the fleet refuses what acts on a single engine.
    known: Sequence[str] = ()

    @property
    def version(self) -> str:
        """The pinned version."""
        return self.package.rpartition("=" if self.source != "npm" else "@")[2]

    @property
    def prefix(self) -> Path:
        """The folder that it is installed in."""
        return ROOT / "build" / "clients" / self.name

    def program(self, name: str) -> str:
        """Return the path of an installed command."""
        folder = self.prefix / ("bin" if self.source == "pip" else "node_modules/.bin")
        return str(folder / name)

    def install(self) -> None:
        """Install it into its prefix unless this version is there. Raise ClientError."""
        mark = self.prefix / "installed"
        if self.source == "here" or (mark.exists() and mark.read_text() == self.package):
            return
        shutil.rmtree(self.prefix, ignore_errors=True)
        self.prefix.mkdir(parents=True)
        if self.source == "npm":
            command = ["npm", "install", "--prefix", str(self.prefix), "--no-audit", "--no-fund"]
            execute([*command, self.package], timeout_s=_INSTALL_S)
        else:
            execute([sys.executable, "-m", "venv", str(self.prefix)], timeout_s=_INSTALL_S)
            command = [self.program("python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            execute([*command, *self.beside, self.package], timeout_s=_INSTALL_S)
        mark.write_text(self.package)


def execute(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    stdin: str = "",
    timeout_s: float = _RUN_S,
    statuses: Sequence[int] = (0,),
) -> str:
    """Run a command to its end and return its standard output. Raise ClientError."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=folder,
        # Some clients take their folder from PWD.
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PWD": str(folder or Path.cwd()), **(env or {})},
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(stdin, timeout=timeout_s)
        except BaseException as error:  # whatever ends the wait, a signal too
            os.killpg(process.pid, 9)
            if isinstance(error, subprocess.TimeoutExpired):
                raise ClientError(f"{command[0]} did not end within {timeout_s:.0f} s") from error
            raise
    if process.returncode not in statuses:
        words = (errors.strip() or output.strip())[-_OUTPUT_CHARS:]
        raise ClientError(f"{Path(command[0]).name} exited with {process.returncode}: {words}")
    return output


def prompts(count: int = 4) -> list[str]:
    """Return tasks with thoughts of 197 to 332 tokens."""
    return [task(f"{chr(97 + number)}xyz", 20 + 5 * number, 6).prompt for number in range(count)]


def program(name: str) -> Callable[[Client, Run], Outcome]:
    """Return the run of a program of `programs/` in the client's environment."""

    def run(client: Client, run: Run) -> Outcome:
        command = [client.program("python"), str(PROGRAMS / name), run.url, MODEL]
        output = execute(command, folder=run.folder, stdin=json.dumps(prompts()))
        # Some libraries print lines of their own.
        return Outcome(**json.loads(output.splitlines()[-1]))

    return run
