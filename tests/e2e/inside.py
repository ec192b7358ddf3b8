"""Run a file of tests in network, mount and process namespaces of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.namespaces import NamespacesUnavailable, command_in_namespaces


def run_inside(tests: Path, folder: Path, *options: str, timeout_s: float = 1700) -> None:
    """Run these tests with pytest's options; fail as they do, and skip where there are no namespaces.

    `folder`: for their temporary files.
    """
    command = [sys.executable, "-m", "pytest", str(tests), "-p", "no:cacheprovider", "-rA", *options]
    try:
        inside = command_in_namespaces([*command, "--basetemp", str(folder / "inside")])
    except NamespacesUnavailable as reason:
        pytest.skip(str(reason))
    # The whole run has looked whether the machine is fast enough.
    environment = {**os.environ, "TAILRACE_TEST_ANYWAY": "1"}
    result = subprocess.run(inside, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert result.returncode == 0, (result.stdout + result.stderr)[-8000:]
