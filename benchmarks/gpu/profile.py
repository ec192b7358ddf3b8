"""`tailrace profile` of one instance: what the policies and the simulator go by."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.cluster import tailrace_cluster
from benchmarks.gpu.setting import Budget, Setting
from benchmarks.gpu.tables import Rows


def run(setting: Setting, model: Path, budget: Budget) -> dict[str, object]:
    """The profile as the command gives it."""
    with tailrace_cluster(setting, model, 1) as cluster:
        allowed = max(1, min(setting.profile_budget_s, int(budget.left_s) - 30))
        command = [sys.executable, "-m", "tailrace", "profile", "worker-0", "--budget", str(allowed)]
        command += ["-o", "json", "--admin", cluster.admin]
        done = subprocess.run(command, capture_output=True, text=True, timeout=allowed + 60)
        if done.returncode != 0:
            raise RuntimeError(f"tailrace profile: {done.stderr.strip()[-600:]}")
        (profile,) = json.loads(done.stdout)["profiles"]
    return {"budget_s": allowed, "profile": profile}


def table(figures: dict[str, object]) -> Rows:
    """Each figure of the profile, `decode.base_ms` and the like."""
    profile = figures["profile"]
    assert isinstance(profile, dict)
    return Rows("Profile", ["figure", "value"], _flat(profile))


def _flat(value: dict[str, object], before: str = "") -> list[list[str]]:
    rows: list[list[str]] = []
    for name, entry in value.items():
        if isinstance(entry, dict):
            rows += _flat(entry, f"{before}{name}.")
        else:
            values = entry if isinstance(entry, list) else [entry]
            shown = (f"{each:.6g}" if isinstance(each, float) else str(each) for each in values)
            rows.append([before + name, ", ".join(shown)])
    return rows
