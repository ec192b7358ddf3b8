"""An engine with a rank on each of two nodes, which are network namespaces.

`make test-ranks`. The tests are in two_nodes.py and run in namespaces of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.inside import run_inside

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]


def test_engine_on_two_nodes(tmp_path: Path) -> None:
    run_inside(Path(__file__).with_name("two_nodes.py"), tmp_path, "-m", "slow", timeout_s=2900)
