"""The pods of a fleet on Kubernetes, each in a network namespace of its own.

The tests are in pods.py and run in namespaces of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.namespaces import NamespacesUnavailable, command_in_namespaces

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(900)]

TESTS = Path(__file__).with_name("pods.py")


def test_the_life_of_pods(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(TESTS), "-p", "no:cacheprovider", "-rA"]
    try:
        inside = command_in_namespaces([*command, "--basetemp", str(tmp_path / "inside")])
    except NamespacesUnavailable as reason:
        pytest.skip(str(reason))
    # The whole run has looked whether the machine is fast enough.
    environment = {**os.environ, "TAILRACE_TEST_ANYWAY": "1"}
    result = subprocess.run(inside, capture_output=True, text=True, timeout=800, env=environment)
    assert result.returncode == 0, (result.stdout + result.stderr)[-8000:]
