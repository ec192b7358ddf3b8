"""Measure the cost of unequal lengths in a batch: batches of equal total KV, by attention backend."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.gpu.setting import Budget, Setting
from benchmarks.gpu.tables import Rows

SHAPES: Final = ("equal", "uniform", "one in sixteen long", "one long")
# In addition to the shapes: minimal lengths, to subtract everything but attention.
BASE: Final = "shortest"
_ENGINE_S: Final = 200.0


def spread(shape: str, count: int, total: int, shortest: int) -> list[int]:
    """Return `count` lengths of at least `shortest` that add up to `total`, distributed as `shape` says.

    Raise ValueError if `total` is too small.
    """
    if total < count * shortest:
        raise ValueError(f"{count} requests of {shortest} tokens are more than {total}")
    spare = total - count * shortest
    return [shortest + extra for extra in _shares(_weights(shape, count), spare)]


def _weights(shape: str, count: int) -> list[float]:
    if shape == "equal":
        return [1.0] * count
    if shape == "uniform":
        return [number + 0.5 for number in range(count)]
    if shape == "one in sixteen long":
        return [1.0 if number % 16 == 0 else 0.0 for number in range(count)]
    if shape == "one long":
        # One request has an eighth of the KV.
        return [count / 7 if number == 0 else 1.0 for number in range(count)]
    raise ValueError(f"unknown shape {shape!r}")


def _shares(weights: Sequence[float], spare: int) -> list[int]:
    """Return integers in proportion to the weights that add up to `spare`, by largest remainder."""
    total = sum(weights)
    exact = [weight / total * spare for weight in weights]
    floors = [math.floor(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda n: floors[n] - exact[n])
    for number in order[: spare - sum(floors)]:
        floors[number] += 1
    return floors


def attention_ratio(step_ms: dict[str, float]) -> dict[str, float]:
    """Return each shape's attention time relative to that of equal lengths; the base's step is subtracted."""
    base = step_ms[BASE]
    equal = step_ms["equal"] - base
    return {s: (t - base) / equal for s, t in step_ms.items() if s != BASE and equal > 0}


def run(setting: Setting, model: Path, budget: Budget) -> dict[str, object]:
    """Measure the median step times of each backend and shape. Raise RuntimeError if no backend works."""
    found: dict[str, object] = {}
    for backend in setting.backends:
        name = backend or "vLLM's choice"
        if budget.left_s < _ENGINE_S and found:
            found[name] = "not run: out of time"
            continue
        found[name] = _engine(setting, model, backend, budget.left_s)
    if all(isinstance(result, str) for result in found.values()):
        raise RuntimeError(f"no backend could be measured: {found}")
    return {"requests": setting.batch, "backends": found}


def _engine(setting: Setting, model: Path, backend: str, timeout_s: float) -> dict[str, object] | str:
    command = [sys.executable, "-m", "benchmarks.gpu.lengths_engine", str(model), "--device", setting.device]
    # Beside the model, in a temporary folder.
    out = model.parent / "lengths.json"
    command += ["--backend", backend, "--out", str(out)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"not run: not done within {timeout_s:.0f} s"
    if done.returncode != 0:
        return f"failed: {' '.join(done.stderr.strip().splitlines()[-3:])[-600:]}"
    result: dict[str, object] = json.loads(out.read_text())
    steps = result["step_ms"]
    assert isinstance(steps, dict)
    return result | {"attention_ratio": attention_ratio(steps)}


def table(figures: dict[str, object]) -> Rows:
    """Return a row per backend: step times, and their ratios to equal lengths."""
    backends = figures["backends"]
    assert isinstance(backends, dict)
    rows: list[list[str]] = []
    notes: list[str] = []
    for name, result in backends.items():
        if isinstance(result, str):
            notes.append(f"{name}: {result}")
            continue
        steps, ratios = result["step_ms"], result["attention_ratio"]
        rows.append([f"{name}: step, ms", *(f"{steps[s]:.2f}" for s in (BASE, *SHAPES))])
        whole = (f"{steps[s] / steps['equal']:.2f}" for s in SHAPES)
        rows.append([f"{name}: step relative to equal lengths", "", *whole])
        shown = (f"{ratios[s]:.2f}" if s in ratios else "" for s in SHAPES)
        rows.append([f"{name}: attention alone", "", *shown])
    title = f"A decode step of {figures['requests']} requests of equal total KV"
    return Rows(title, ["backend", BASE, *SHAPES], rows, notes)
