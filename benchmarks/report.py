"""Where benchmarks leave their figures, and what machine they were taken on."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> dict[str, str | int]:
    """The machine, as a reader of the figures needs it."""
    model = ""
    with open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"cpu": model, "cores": os.cpu_count() or 0, "python": platform.python_version()}


def save(name: str, figures: dict[str, object]) -> Path:
    """Write one benchmark's figures as benchmarks/results/<name>.json."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"benchmark": name, "taken": time.strftime("%Y-%m-%dT%H:%M:%S"), "machine": machine(), **figures}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def print_json(name: str, figures: dict[str, object]) -> None:
    """Print one benchmark's figures, with the machine, as one object on standard output."""
    json.dump({"benchmark": name, "machine": machine(), **figures}, sys.stdout, indent=2)
    sys.stdout.write("\n")
