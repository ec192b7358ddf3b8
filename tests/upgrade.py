"""`make test-upgrade FROM=REVISION`: upgrade a running local cluster from an older revision, and roll back.

The cluster starts with that revision's code. Under streaming load every process is then restarted with the
code of this tree (examples/rolling_restart.py), and after that with the older code again, so that old and new
processes run side by side. Engines are simulated; both revisions use this environment's packages.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tailrace.local.ports import free_ports

_ROOT: Final = Path(__file__).resolve().parent.parent
_START_S: Final = 300
_RESTARTS_S: Final = 3_600
_FRONTS: Final = ("--frontends", "2", "--front", "python")
_UP: Final = ("--engine", "simulated", "--workers", "3", "--schedulers", "2", *_FRONTS)
# Slow enough that most streams are in progress when a process is restarted.
_ENGINES: Final = ("--sim", "speed=0.5")


def check_out(revision: str, folder: Path) -> None:
    """Write the files of a revision into a folder, with its generated modules. Raise CalledProcessError."""
    archive = subprocess.run(["git", "archive", revision], cwd=_ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    _run(folder, {}, "scripts/gen_protos.py")


@contextmanager
def local_cluster(code: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a local cluster of this code for the block. Raise CalledProcessError, TimeoutExpired."""
    (port,) = free_ports(1)
    try:
        _run(code, environment, "-m", "tailrace", "up", *_UP, "--port", str(port), *_ENGINES)
        yield
    finally:
        # With the code of this tree, which must be able to stop what an older one has started.
        _run(_ROOT, environment, "-m", "tailrace", "down")


def restart_all(code: Path, environment: Mapping[str, str], streams: int) -> bool:
    """Restart every process with this code under so many streams; return whether no client was affected."""
    arguments = ["-m", "examples.rolling_restart", "--streams", str(streams)]
    return _python(code, environment, arguments, _RESTARTS_S).returncode == 0


def _run(code: Path, environment: Mapping[str, str], *arguments: str) -> None:
    _python(code, environment, arguments, _START_S).check_returncode()


def _python(
    code: Path, environment: Mapping[str, str], arguments: Sequence[str], seconds: float
) -> subprocess.CompletedProcess[bytes]:
    variables = {**os.environ, **environment, "PYTHONPATH": str(code)}
    return subprocess.run([sys.executable, *arguments], cwd=code, env=variables, timeout=seconds)


def main() -> int:
    """Upgrade and roll back; exit with 1 if a client saw an error or a different answer."""
    parser = argparse.ArgumentParser(
        prog="make test-upgrade", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", help="revision of this repository to start from")
    parser.add_argument("--streams", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tailrace-upgrade-") as name:
        older = Path(name) / "older"
        older.mkdir()
        try:
            check_out(options.revision, older)
        except subprocess.CalledProcessError as error:
            reason = error.stderr.decode(errors="replace").strip() if error.stderr else str(error)
            print(f"{options.revision} cannot be checked out: {reason}", file=sys.stderr)
            return 2
        environment = {"TAILRACE_RUN_DIR": str(Path(name) / "run")}
        with local_cluster(older, environment):
            print(f"\nfrom {options.revision} to this tree:", flush=True)
            upgraded = restart_all(_ROOT, environment, options.streams)
            print(f"\nback to {options.revision}:", flush=True)
            rolled_back = restart_all(older, environment, options.streams)
    return 0 if upgraded and rolled_back else 1


if __name__ == "__main__":
    sys.exit(main())
