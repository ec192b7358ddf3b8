"""`make check-gpu [PART=transfer|serving|migration|lengths|profile]`: each part in under ten minutes.

Exits with 3 and a message if there is no NVIDIA GPU. `--device cpu` runs the same code with a model of two
layers, to check that it works; its figures say nothing about GPUs and are saved separately.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from rich.console import Console

from benchmarks.gpu.devices import description, nvidia_gpu
from benchmarks.gpu.model import write_model
from benchmarks.gpu.setting import ON_CPU, ON_GPU, Budget, Setting
from benchmarks.gpu.tables import Rows
from tests.harness.report import RESULTS

PARTS: Final = ("transfer", "serving", "migration", "lengths", "profile")
NO_GPU: Final = 3
# How long a part may exceed its budget before it is aborted: with the default, under ten minutes in total.
_OVERTIME_S: Final = 30.0


class Part(Protocol):
    """The module of a part."""

    def run(self, setting: Setting, model: Path, budget: Budget) -> dict[str, object]: ...

    def table(self, figures: dict[str, object]) -> Rows: ...


def load_part(name: str) -> Part:
    """Import a part: each imports torch or vLLM only if it needs it."""
    module: Part = importlib.import_module(f"benchmarks.gpu.{name}")
    return module


def save(name: str, setting: Setting, seconds: float, figures: dict[str, object], folder: Path) -> Path:
    """Write gpu-NAME.json, or gpu-NAME-cpu.json for a CPU; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{name}{'' if setting.device == 'cuda' else '-cpu'}.json"
    record = {
        "benchmark": f"gpu-{name}",
        "taken": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "device": setting.device,
        "machine": description(),
        "seconds": round(seconds, 1),
        "setting": asdict(setting),
        **figures,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def _on_timeout(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("exceeded its time budget")


def main() -> int:
    """Run the selected parts, one after another; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="make check-gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="per part")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    if options.device == "cuda" and nvidia_gpu() is None:
        print("check-gpu: not run: no NVIDIA GPU (nvidia-smi finds none)", file=sys.stderr)
        return NO_GPU
    # An external time limit sends SIGTERM; the servers must not outlive this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGALRM, _on_timeout)
    setting = ON_GPU if options.device == "cuda" else ON_CPU
    console = Console()
    failed = []
    with tempfile.TemporaryDirectory(prefix="tailrace-gpu-") as folder:
        model = write_model(Path(folder) / "model", setting.shape)
        for name in options.parts or PARTS:
            console.print(f"check-gpu: {name}, on {setting.device}")
            started_s = time.monotonic()
            part = load_part(name)
            signal.setitimer(signal.ITIMER_REAL, options.budget + _OVERTIME_S)
            try:
                figures = part.run(setting, model, Budget(options.budget))
            except Exception as error:  # noqa: BLE001 - the other parts are still worth running
                console.print(f"check-gpu: {name} failed: {type(error).__name__}: {error}", markup=False)
                failed.append(name)
                continue
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            path = save(name, setting, time.monotonic() - started_s, figures, options.results)
            rows = part.table(figures)
            console.print(rows.render())
            for note in rows.notes:
                console.print(note, markup=False)
            console.print(f"figures: {path}", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
