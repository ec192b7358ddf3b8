"""Save the figures of benchmarks, with a description of the machine."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path

from rich.console import Console

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def machine() -> dict[str, str | int]:
    """Describe the machine for readers of the figures."""
    model = ""
    with open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"cpu": model, "cores": os.cpu_count() or 0, "python": platform.python_version()}


def save(name: str, figures: dict[str, object]) -> Path:
    """Write a benchmark's figures to benchmarks/results/<name>.json; return the path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"benchmark": name, "taken": time.strftime("%Y-%m-%dT%H:%M:%S"), "machine": machine(), **figures}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def print_json(name: str, figures: dict[str, object]) -> None:
    """Print a benchmark's figures, with the machine, as one JSON object."""
    json.dump({"benchmark": name, "machine": machine(), **figures}, sys.stdout, indent=2)
    sys.stdout.write("\n")


def table_console(width: int) -> Console:
    """Return a console for tables on the standard output; files and pipes get this width."""
    return Console(width=None if sys.stdout.isatty() else width)
