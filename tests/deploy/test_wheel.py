"""The wheel in an empty environment: the control plane alone, and a fleet of simulated engines without vLLM.

Downloads packages, as `make install` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tailrace.local.ports import free_ports
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT: Final = Path(__file__).resolve().parents[2]
MAX_CONTROL_BYTES: Final = 60_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    return next(folder.glob("tailrace-*.whl"))


def pip(python: Path, *arguments: str) -> None:
    """Run pip with this interpreter."""
    command = [str(python), "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    subprocess.run(command, check=True, timeout=600)


def test_the_control_plane_is_a_small_download(wheel: Path, tmp_path: Path) -> None:
    pip(Path(sys.executable), "download", "--dest", str(tmp_path), str(wheel))
    names = [file.name for file in tmp_path.iterdir()]
    assert not [name for name in names if name.startswith(("torch", "vllm", "nvidia"))]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < MAX_CONTROL_BYTES


@pytest.fixture
def fleet(wheel: Path, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Run `tailrace up` of an environment without vLLM; return the command and the address."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=WAIT_S)
    programs = tmp_path / "venv" / "bin"
    pip(programs / "python", "install", f"{wheel}[simulated,etcd,console]")
    (port,) = free_ports(1)
    tailrace = programs / "tailrace"
    up = [str(tailrace), "up", "--engine", "simulated", "--port", str(port)]
    # Nothing of the environment that runs the tests: vllm-rs has to be fetched.
    variables = {**os.environ, "PATH": "/usr/bin:/bin", "TAILRACE_RUN_DIR": str(tmp_path / "run")}
    variables.pop("PYTHONPATH", None)
    try:
        subprocess.run(up, check=True, timeout=2 * WAIT_S, env=variables)
        yield tailrace, f"http://127.0.0.1:{port}"
    finally:
        subprocess.run([str(tailrace), "down"], check=True, timeout=WAIT_S, env=variables)


def test_a_fleet_without_vllm_answers(fleet: tuple[Path, str]) -> None:
    tailrace, url = fleet
    assert (tailrace.parent / "vllm-rs").exists()
    body = {
        "model": "tiny",
        "temperature": 0,
        "messages": [{"role": "user", "content": "Count down from 12 with wxyz, then from 9."}],
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        (choice,) = json.load(response)["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"]
