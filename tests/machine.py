"""How much of the machine the tests can have."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

# Computes for a quarter of a second and prints the CPU time that it was given.
_PROBE: Final = """
import time
until_s, cpu_s = time.perf_counter() + 0.25, time.process_time()
while time.perf_counter() < until_s:
    pass
print((time.process_time() - cpu_s) / 0.25)
"""
_ATTEMPTS: Final = 5


def free_cores(enough: float) -> float:
    """Return how many cores, of two, this process's children get now.

    A CPU quota and other processes both count. It is the best of a few attempts, or the first that is enough.
    """
    best = 0.0
    for _ in range(_ATTEMPTS):
        if (best := max(best, _measured())) >= enough:
            break
    return best


def _measured() -> float:
    probes = [
        subprocess.Popen([sys.executable, "-S", "-c", _PROBE], stdout=subprocess.PIPE, text=True)
        for _ in range(min(2, len(os.sched_getaffinity(0))))
    ]
    return sum(float(probe.communicate()[0]) for probe in probes)
