"""An engine with a rank on each of two nodes, which are network namespaces.

`make test-ranks`. The tests are in two_nodes.py and run in namespaces of their own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.namespaces import NamespacesUnavailable, command_in_namespaces

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

TESTS = Path(__file__).with_name("two_nodes.py")


def test_engine_on_two_nodes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(TESTS), "-p", "no:cacheprovider", "-rA", "-m", "slow"]
    try:
        inside = command_in_namespaces([*command, "--basetemp", str(tmp_path / "inside")])
    except NamespacesUnavailable as reason:
        pytest.skip(str(reason))
    result = subprocess.run(inside, capture_output=True, text=True, timeout=1400)
    assert result.returncode == 0, result.stdout[-8000:]
