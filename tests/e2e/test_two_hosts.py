"""Fleets on two hosts, which are network namespaces, from one fleet.yaml.

The tests are in two_hosts.py, two_models.py and two_policies.py, and run in namespaces of their own.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.inside import run_inside

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1800)]


def test_a_fleet_on_two_hosts(tmp_path: Path) -> None:
    run_inside(Path(__file__).with_name("two_hosts.py"), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="keys need vLLM's Python app")
def test_two_models_on_two_hosts(tmp_path: Path) -> None:
    run_inside(Path(__file__).with_name("two_models.py"), tmp_path)


@pytest.mark.slow
def test_a_policy_of_its_own_on_two_hosts(tmp_path: Path) -> None:
    run_inside(Path(__file__).with_name("two_policies.py"), tmp_path)
