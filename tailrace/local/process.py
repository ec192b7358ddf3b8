"""A part of the cluster as a process with its own session and a log file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from tailrace.local.plan import PartSpec, Tier
from tailrace.local.state import Part, identify
from tailrace.service.etcd import etcd_environment

_LAST_LINES: Final = 20
# An error that a service logs (tailrace.service.runtime), or one of its command line; and its message.
_ERROR: Final = re.compile(r"(?:\S+ \S+ ERROR [\w.]+|Error): (.+)")
# A front end's last line does not say why its API server has ended.
_SEE_ABOVE: Final = "the API server "
# Click's exit status for a wrong command line.
_USAGE_STATUS: Final = 2
# What `tailrace serve` takes from the environment and a plan decides: it is about another cluster, whose
# operator runs this one, too.
DECIDED: Final = frozenset(
    {"TAILRACE_ADVERTISE", "TAILRACE_CLUSTER", "TAILRACE_SERVE_ARGS", "TAILRACE_TLS_DIR"}
)


class PartFailed(RuntimeError):
    """A part exited or was not ready in time. The message is for users, and includes log lines."""


class PartRefused(PartFailed):
    """A part refuses its command line, which has an argument of the user in it."""


class PartProcess:
    """A part started by this process. It has its own session, so it outlives this process."""

    def __init__(
        self, spec: PartSpec, log: Path, environment: Mapping[str, str], directory: str = ""
    ) -> None:
        """Start the part in a directory (empty: the working directory).

        `environment`: in addition to that of this process.
        Raise PartFailed if its program cannot be run, or its log cannot be written.
        """
        self.spec = spec
        self.log = log
        try:
            output = log.open("wb")
        except OSError as error:
            raise PartFailed(f"{spec.name}: cannot write {log}: {error.strerror}") from error
        try:
            with output:
                self._process = subprocess.Popen(
                    list(spec.command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**_inherited(spec.tier), **environment},
                    cwd=directory or None,
                    start_new_session=True,
                )
        except OSError as error:
            # The program or the directory.
            raise PartFailed(f"{spec.name}: cannot run {error.filename}: {error.strerror}") from error
        self.part = Part(identity=identify(self._process.pid), log=str(log), spec=spec)

    def check(self) -> None:
        """Raise PartFailed with the last lines of the log if the part has exited; PartRefused if because of
        its command line."""
        code = self._process.poll()
        if code is not None:
            kind = PartRefused if code == _USAGE_STATUS else PartFailed
            raise kind(f"{self.spec.name} exited while starting ({_cause(code)}){self._reason()}")

    def timed_out(self) -> PartFailed:
        """Return the error of a part that was not ready in time."""
        return PartFailed(
            f"{self.spec.name} was not ready after {self.spec.timeout_s:.0f} s{self._log_tail()}"
        )

    def reap(self) -> None:
        """Reap the process if it has exited, so that it does not remain a zombie."""
        self._process.poll()

    def _reason(self) -> str:
        """Return the error with which the part ended, if that is the last line of its log, else the last
        lines."""
        last = self._last_lines()
        match = _ERROR.match(last[-1]) if last else None
        if match is None or match[1].startswith(_SEE_ABOVE) or any("Traceback" in line for line in last):
            return self._log_tail()
        return f": {match[1]} ({self.log})"

    def _log_tail(self) -> str:
        last = self._last_lines()
        if not last:
            return f"; nothing was written to {self.log}"
        return "\n".join([f"; the last lines of {self.log}:", *(f"  {line}" for line in last)])

    def _last_lines(self) -> list[str]:
        with self.log.open(errors="replace") as lines:
            return [line.rstrip() for line in deque(lines, maxlen=_LAST_LINES)]


def _inherited(tier: Tier) -> dict[str, str]:
    """Return what a part of this tier gets of this process's environment."""
    if tier is Tier.ETCD:
        return etcd_environment()
    return {name: value for name, value in os.environ.items() if name not in DECIDED}


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}; out of memory?" if code == -signal.SIGKILL else name


GRACE_S: Final = 8.0
"""Time for the parts of a tier to finish or hand over their work and exit, in seconds."""
CLOSE_S: Final = 5.0
"""Time to exit without that, after a second SIGTERM."""
_KILL_S: Final = 5.0
_POLL_S: Final = 0.05


def stop_parts(parts: Sequence[Part], reap: Callable[[], None] = lambda: None) -> list[str]:
    """Stop all processes of all parts, front ends first and etcd last; return the names of those that ran.

    Send SIGTERM to the part itself, and again after its time to drain; then SIGKILL to the rest of its
    session. `reap` is called while waiting, for callers whose children the parts are.
    """
    stopped: list[str] = []
    order = sorted(parts, key=lambda part: -part.place)
    for _, tier in groupby(order, key=lambda part: part.tier):
        stopped += _stop_tier(list(tier), reap, GRACE_S)
    return stopped


def ask_to_stop(part: Part) -> None:
    """Have a part drain and exit; do not wait for it."""
    if part.identity.alive():
        _signal(part.identity.pid, signal.SIGTERM)


def stop_part(part: Part, drain_s: float, reap: Callable[[], None] = lambda: None) -> None:
    """Stop one part, which may drain for `drain_s` seconds, as `stop_parts` does."""
    _stop_tier([part], reap, drain_s)


def _stop_tier(tier: list[Part], reap: Callable[[], None], drain_s: float) -> list[str]:
    running = [part.name for part in tier if part.identity.session_members()]
    for patience_s in (drain_s, CLOSE_S):
        for part in tier:
            if part.identity.alive():
                _signal(part.identity.pid, signal.SIGTERM)
        _wait(lambda: any(part.identity.alive() for part in tier), patience_s, reap)
    # The rest: parts that did not exit, and children that they left behind.
    for part in tier:
        for pid in part.identity.session_members():
            _signal(pid, signal.SIGKILL)
    _wait(lambda: any(part.identity.session_members() for part in tier), _KILL_S, reap)
    return running


def _wait(running: Callable[[], bool], timeout_s: float, reap: Callable[[], None]) -> None:
    deadline = time.monotonic() + timeout_s
    reap()
    while running() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        reap()


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has exited in the meantime
