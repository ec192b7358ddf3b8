"""The systemd units pass systemd's verifier, and their commands parse."""

from __future__ import annotations

import re
import shutil
import sysconfig
from pathlib import Path

import pytest

from tests.deploy.compose import DEPLOY
from tests.deploy.services import assert_systemd_accepts, longest_s, parse_serve

SYSTEMD = DEPLOY / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))
WITH_DEVICES = ("tailrace-ranks@.service", "tailrace-worker@.service")


def _environment_file(path: Path) -> dict[str, str]:
    lines = (line for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


def _settings(unit: Path, key: str) -> list[str]:
    return [found[1] for found in re.finditer(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)]


def test_there_is_a_unit_for_every_service() -> None:
    assert [unit.name for unit in UNITS] == [
        "tailrace-edge.service",
        "tailrace-frontend.service",
        "tailrace-migration.service",
        "tailrace-monitor.service",
        "tailrace-ranks@.service",
        "tailrace-scheduler.service",
        "tailrace-worker@.service",
    ]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="Debian package systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    # The verifier requires the programs to exist.
    scripts = sysconfig.get_path("scripts")
    for unit in [*UNITS, SYSTEMD / "tailrace.target"]:
        text = unit.read_text().replace("/opt/tailrace/bin/", f"{scripts}/")
        (tmp_path / unit.name).write_text(text)
    assert_systemd_accepts(tmp_path)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_commands_parse(unit: Path) -> None:
    values = _environment_file(SYSTEMD / "tailrace.env.example")
    for line in _settings(unit, "Environment"):
        values |= dict(pair.split("=", 1) for pair in line.split())
    (command,) = _settings(unit, "ExecStart")
    program, serve, *arguments = command.split()
    assert (program, serve) == ("/opt/tailrace/bin/tailrace", "serve")
    specifiers = {"%H": "host", "%i": "0"}
    for name, value in specifiers.items():
        arguments = [word.replace(name, value) for word in arguments]
    parse_serve([re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], word) for word in arguments])


def test_users_need_keys_as_installed() -> None:
    shared = _environment_file(SYSTEMD / "tailrace.env.example")
    own = " ".join(_settings(SYSTEMD / "tailrace-frontend.service", "Environment"))
    assert "TAILRACE_HTTP=0.0.0.0:8000" in own
    assert shared["TAILRACE_API_KEYS"] and "TAILRACE_INSECURE" not in shared
    assert shared["TAILRACE_API_KEYS"] in (SYSTEMD / "INSTALL.md").read_text()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_hardened_and_restarted(unit: Path) -> None:
    for key, value in {
        "User": "tailrace",
        "Restart": "always",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "CapabilityBoundingSet": "",
        "SystemCallFilter": "@system-service",
    }.items():
        assert _settings(unit, key) == [value]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_is_not_killed_while_it_drains(unit: Path) -> None:
    (given,) = _settings(unit, "TimeoutStopSec")
    assert float(given) > longest_s(unit.name)


@pytest.mark.parametrize("unit", WITH_DEVICES)
def test_engines_may_use_devices(unit: str) -> None:
    # Either would hide the GPU: ProtectClock implies a list of allowed devices.
    worker = SYSTEMD / unit
    assert _settings(worker, "PrivateDevices") == _settings(worker, "ProtectClock") == []


@pytest.mark.parametrize("unit", WITH_DEVICES)
def test_engines_find_their_gpu_after_a_reboot(unit: str) -> None:
    """NoNewPrivileges forbids the setuid helper that creates device nodes: it runs before, privileged."""
    worker = SYSTEMD / unit
    (prepare,) = _settings(worker, "ExecStartPre")
    assert prepare.startswith("-+") and "nvidia-modprobe" in prepare
    assert "nvidia-persistenced.service" in _settings(worker, "After")[0].split()
    assert _settings(worker, "LimitMEMLOCK") == ["infinity"]
