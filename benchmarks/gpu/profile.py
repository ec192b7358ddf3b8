"""Run `tailrace profile` on one instance: policies and simulator use its result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.cluster import tailrace_cluster
from benchmarks.gpu.setting import Budget, Setting
from benchmarks.gpu.tables import Rows


def run(setting: Setting, model: Path, budget: Budget) -> dict[str, object]:
    """Return the profile as printed by the command. Raise RuntimeError if it fails."""
    with tailrace_cluster(setting, model, 1) as cluster:
        budget_s = max(1, min(setting.profile_budget_s, int(budget.left_s) - 30))
        command = [sys.executable, "-m", "tailrace", "profile", "worker-0", "--budget", str(budget_s)]
        command += ["-o", "json", "--admin", cluster.admin]
        done = subprocess.run(command, capture_output=True, text=True, timeout=budget_s + 60)
        if done.returncode != 0:
            raise RuntimeError(f"tailrace profile: {done.stderr.strip()[-600:]}")
        (profile,) = json.loads(done.stdout)["profiles"]
    return {"budget_s": budget_s, "profile": profile}


def table(figures: dict[str, object]) -> Rows:
    """Return a row per figure of the profile, such as `decode.base_ms`."""
    profile = figures["profile"]
    assert isinstance(profile, dict)
    return Rows("Profile", ["figure", "value"], _flat(profile))


def _flat(value: dict[str, object], prefix: str = "") -> list[list[str]]:
    rows: list[list[str]] = []
    for name, entry in value.items():
        if isinstance(entry, dict):
            rows += _flat(entry, f"{prefix}{name}.")
        else:
            values = entry if isinstance(entry, list) else [entry]
            shown = (f"{each:.6g}" if isinstance(each, float) else str(each) for each in values)
            rows.append([prefix + name, ", ".join(shown)])
    return rows
