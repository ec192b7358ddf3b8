"""The pods of a fleet on Kubernetes, each in a network namespace of its own.

The tests are in pods.py and run in namespaces of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.inside import run_inside

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(900)]


def test_the_life_of_pods(tmp_path: Path) -> None:
    run_inside(Path(__file__).with_name("pods.py"), tmp_path)
