"""The pods of a fleet on Kubernetes, each in a network namespace of its own.

The tests are in pods.py, pods_in_clear.py and pods_of_models.py, and run in namespaces of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.inside import run_inside

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "tests",
    [
        "pods.py",
        pytest.param("pods_in_clear.py", marks=pytest.mark.slow),
        pytest.param("pods_of_models.py", marks=pytest.mark.slow),
    ],
)
def test_the_life_of_pods(tmp_path: Path, tests: str) -> None:
    run_inside(Path(__file__).with_name(tests), tmp_path)
