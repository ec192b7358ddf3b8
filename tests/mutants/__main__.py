"""`make mutants`: change random lines of the pure modules, and check whether their tests notice.

Tests run in copies of the tree, so that an interrupted run leaves no changed file behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from tests.mutants.limits import End, Limits, Run, run_limited
from tests.mutants.mutations import Mutant, mutants_of
from tests.mutants.targets import TARGETS, Target

ROOT: Final = Path(__file__).parents[2]
EQUIVALENT: Final = Path(__file__).with_name("equivalent.toml")
RESULTS: Final = ROOT / "benchmarks" / "results" / "mutants.json"
# A mutant may loop forever: its limit is this multiple of the tests' normal CPU time, plus a constant.
_CPU_FACTOR: Final = 5
_EXTRA_S: Final = 30.0
_BASELINE_LIMITS: Final = Limits(cpu_s=600.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a mutant. `reason`: why no test can notice it, if known; it is not run then."""

    mutant: Mutant
    run: Run | None = None
    reason: str = ""

    @property
    def noticed(self) -> bool:
        """Whether the tests failed, or did not end."""
        return self.run is not None and (self.run.end is not End.EXITED or self.run.status != 0)


class BaselineFails(Exception):
    """The tests fail without a mutant; the message is the end of their output."""


def main() -> int:
    """Print each mutant that was not noticed, and the totals; return 1 if fewer than 90% were noticed."""
    args = _arguments()
    targets = [t for t in TARGETS if not args.modules or t.module in args.modules]
    unknown = set(args.modules) - {t.module for t in TARGETS}
    if unknown:
        print(f"mutants: unknown modules: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    equivalent = _read_equivalent()
    verdicts: list[Verdict] = []
    with _copies(args.processes) as copies, ThreadPoolExecutor(args.processes) as pool:
        for target in targets:
            copy = copies.get()
            try:
                limits = Limits(_baseline_cpu_s(copy, target, args.seed) * _CPU_FACTOR + _EXTRA_S)
            finally:
                copies.put(copy)
            mutants = mutants_of(ROOT, target.module, args.count, args.seed)
            futures = [
                pool.submit(_test_mutant, copies, target, mutant, limits, args.seed, equivalent)
                for mutant in mutants
            ]
            found = [future.result() for future in futures]
            verdicts += found
            _print_target(target, found)
    _save(verdicts, args.seed)
    return _print_total(verdicts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "modules", nargs="*", metavar="MODULE", help="default: all; a path such as tailrace/bid_ask.py"
    )
    parser.add_argument("--count", type=int, default=8, help="mutants per module (default: 8)")
    parser.add_argument(
        "--all", dest="count", action="store_const", const=sys.maxsize, help="all mutants; takes hours"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the random choice (default: 1)")
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        help="parallel test runs (default: one per core)",
    )
    return parser.parse_args()


@contextmanager
def _copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """Create copies of all files that git tracks, and of the generated protos."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    with tempfile.TemporaryDirectory(prefix="tailrace-mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            copy = Path(folder) / str(number)
            for name in files:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
            shutil.copytree(ROOT / "tailrace" / "v1", copy / "tailrace" / "v1", dirs_exist_ok=True)
            copies.put(copy)
        yield copies


def _baseline_cpu_s(copy: Path, target: Target, seed: int) -> float:
    """Return the CPU seconds that the tests take. Raise BaselineFails if they fail."""
    run = _run_tests(copy, target, seed, _BASELINE_LIMITS)
    if run.end is not End.EXITED or run.status != 0:
        raise BaselineFails(f"{' '.join(target.tests)}: {run.end.value}: {run.output[-2_000:]}")
    return run.cpu_s


def _test_mutant(
    copies: SimpleQueue[Path],
    target: Target,
    mutant: Mutant,
    limits: Limits,
    seed: int,
    equivalent: Sequence[tuple[str, str, str, str]],
) -> Verdict:
    for module, before, after, reason in equivalent:
        if (module, before, after) == (mutant.module, mutant.before, mutant.after):
            return Verdict(mutant, reason=reason)
    copy = copies.get()
    path = copy / target.module
    original = path.read_text()
    try:
        _write(path, mutant.code)
        return Verdict(mutant, _run_tests(copy, target, seed, limits))
    finally:
        _write(path, original)
        copies.put(copy)


def _write(path: Path, code: str) -> None:
    """Write the file and delete its bytecode: two mutants of a file can have the same size and time stamp."""
    path.write_text(code)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _run_tests(copy: Path, target: Target, seed: int, limits: Limits) -> Run:
    """Run tests until the first failure."""
    pytest = ("-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist")
    # pytest's own timeout is wall time.
    no_timeout = ("-o", "timeout=0")
    hypothesis = ("--hypothesis-profile=mutants", f"--hypothesis-seed={seed}")
    return run_limited(
        [sys.executable, *pytest, *no_timeout, *hypothesis, *target.tests],
        copy,
        {**os.environ, "PYTHONPATH": str(copy)},
        limits,
    )


def _read_equivalent() -> Sequence[tuple[str, str, str, str]]:
    """Return (module, line before, line after, reason) of mutants without a visible effect."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    return [(e["module"], e["before"], e["after"], e["because"]) for e in entries]


def _print_target(target: Target, verdicts: Sequence[Verdict]) -> None:
    noticed = sum(v.noticed for v in verdicts)
    same = sum(bool(v.reason) for v in verdicts)
    print(f"{target.module}: {noticed} of {len(verdicts) - same} noticed, {same} equivalent", flush=True)
    for verdict in verdicts:
        if not (verdict.noticed or verdict.reason):
            mutant = verdict.mutant
            print(f"  {mutant.module}:{mutant.line}\n    - {mutant.before}\n    + {mutant.after}", flush=True)


def _print_total(verdicts: Sequence[Verdict]) -> int:
    counted = [v for v in verdicts if not v.reason]
    noticed = sum(v.noticed for v in counted)
    share = noticed / len(counted) if counted else 1.0
    print(f"{noticed} of {len(counted)} noticed ({share:.0%}), {len(verdicts) - len(counted)} equivalent")
    return 0 if share >= 0.9 else 1


def _save(verdicts: Sequence[Verdict], seed: int) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "module": v.mutant.module,
            "line": v.mutant.line,
            "before": v.mutant.before,
            "after": v.mutant.after,
            "noticed": v.noticed,
            "equivalent_because": v.reason,
            "ended": "" if v.run is None else v.run.end.value,
            "cpu_seconds": 0.0 if v.run is None else round(v.run.cpu_s, 1),
        }
        for v in verdicts
    ]
    RESULTS.write_text(json.dumps({"seed": seed, "mutants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BaselineFails as error:
        sys.exit(f"mutants: {error}")
