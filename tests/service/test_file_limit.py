"""How many files a service may open: a stream takes up to two."""

from __future__ import annotations

import resource
import subprocess
import sys

from tests.waiting import WAIT_S

_SERVICE = """
import resource, subprocess, sys
from tailrace.service.runtime import run_service

async def main(shutdown):
    subprocess.run(["sh", "-c", "ulimit -Sn"], check=True)

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), hard))
run_service(main)
"""


def started_with(open_files: int) -> str:
    """Return how many files a service's own child may open, if the service was started with so many."""
    command = [sys.executable, "-c", _SERVICE, str(open_files)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True
    ).stdout.strip()


def test_a_service_and_its_children_may_open_more_files_than_a_shell_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    assert started_with(256) == str(allowed)


def test_a_higher_limit_is_kept() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    given = 100_000 if hard == resource.RLIM_INFINITY else hard
    assert started_with(given) == str(given)
