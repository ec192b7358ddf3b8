"""A host's start.sh: a change restarts one part after another.

systemctl and docker are stand-ins, which keep a list of what runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
import yaml

from tailrace.fleet.folders import compose, systemd
from tests.fleet.files import TWO_HOSTS, changed, read
from tests.waiting import WAIT_S

# A fleet, the same one with another flag, and with a worker less.
FLEET: Final = TWO_HOSTS
FLAG: Final = changed(FLEET, "models.0.flags.max-model-len", 1024)
FEWER: Final = changed(FLAG, "models.0.replicas", {"a": 3, "b": 2})
WORKERS: Final = [f"worker-a-{number}" for number in range(4)]

_OPERATORS: Final = {"id": "echo 0", "chown": ":", "useradd": ":"}
# The real one, without owners.
_INSTALL: Final = """\
for word; do
  shift
  if [ -n "${skip-}" ]; then skip=; continue; fi
  case "$word" in -g|-o) skip=1 ;; *) set -- "$@" "$word" ;; esac
done
exec /usr/bin/install "$@"
"""
_SYSTEMCTL: Final = """\
echo "$*" >> "$CALLS"
[ "$1" != is-active ] || { [ -e "$STATE/$2" ] && echo active || echo inactive; }
[ "$1" != restart ] || touch "$STATE/$2"
"""
_DOCKER: Final = """\
shift
for name; do :; done
case "$1" in
  config) ls services ;;
  ps) cat "$STATE/$name" 2>/dev/null || : ;;
  up) echo "$*" >> "$CALLS"; [ ! -e "services/$name" ] || cp "services/$name" "$STATE/$name" ;;
esac
"""


class Host:
    """A host's folder, and a machine on which its start.sh runs."""

    def __init__(self, folder: Path) -> None:
        self.machine, self.folder = folder / "machine", folder / "a"
        for name in ("bin", "state", "units"):
            (self.machine / name).mkdir(parents=True)
        for name, text in {
            **_OPERATORS,
            "install": _INSTALL,
            "systemctl": _SYSTEMCTL,
            "docker": _DOCKER,
        }.items():
            self._program(name, text)
        for name in ("tailrace", "python"):
            # `python` is the probe.
            self._program(name, f'echo "{name} $*" >> "$CALLS"')

    def _program(self, name: str, text: str) -> None:
        path = self.machine / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)

    def write(self, files: Mapping[str, str]) -> None:
        """Put a host's folder in place of the one before, with this machine's paths."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for real, here in (
                ("/opt/tailrace/bin", "bin"),
                ("/etc/tailrace", "etc"),
                ("/etc/systemd/system", "units"),
            ):
                text = text.replace(real, str(self.machine / here)) if name == "start.sh" else text
            path.write_text(text)

    def start(self) -> list[str]:
        """Run start.sh; return what it called."""
        calls = self.machine / "calls"
        calls.write_text("")
        environment = {
            **os.environ,
            "PATH": f"{self.machine / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "STATE": str(self.machine / "state"),
        }
        subprocess.run(["sh", str(self.folder / "start.sh")], env=environment, check=True, timeout=WAIT_S)
        return calls.read_text().splitlines()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_units_restart_one_after_another(host: Host, tmp_path: Path) -> None:
    def start(content: object) -> list[str]:
        file, options = read(tmp_path, content)
        host.write(systemd(file.fleet, options, "a").files)
        told = ("restart", "disable", "python")
        return [call for call in host.start() if call.startswith(told)]

    first = start(FLEET)
    # Nothing waits: what a part needs may be on a host that starts later.
    assert len(first) == 9 and all(call.startswith("restart tailrace-") for call in first)
    assert start(FLEET) == []
    again = start(FLAG)
    assert [call.split()[0] for call in again] == ["restart", "python"] * (len(again) // 2)
    assert {f"restart tailrace-{name}.service" for name in WORKERS} < set(again)
    assert start(FEWER)[0] == "disable --now tailrace-worker-a-3.service"


def test_containers_are_replaced_one_after_another(host: Host, tmp_path: Path) -> None:
    def start(content: object) -> list[str]:
        file, options = read(tmp_path, content)
        files = compose(file.fleet, options, "a").files
        services = yaml.safe_load(files["compose.yaml"])["services"]
        host.write({**files, **{f"services/{name}": str(each) for name, each in services.items()}})
        return host.start()

    each = "up --detach --no-deps"
    first = start(FLEET)
    assert first[-1] == "up --detach --remove-orphans"
    assert len(first) == 10 and all(
        call.startswith(f"{each} ") and "--wait" not in call for call in first[:-1]
    )
    assert start(FLEET) == sorted(first[:-1]) + first[-1:]
    waits = [call.split()[-1] for call in start(FLAG) if "--wait" in call]
    assert set(WORKERS) < set(waits)
    calls = start(FEWER)
    assert not any("worker-a-3" in call for call in calls)
