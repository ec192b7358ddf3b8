"""Compare each paper's policy with its rivals on real vLLM workers, checking every answer."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from rich.console import Console

from experiments.live.vllm import ares, arrow, cascade, pascal, switch
from experiments.live.vllm.plan import Bench, Scale, progress
from experiments.live.vllm.report import Comparison, summary
from tests.harness.report import machine, save
from tests.harness.vllm_fleet import WORKERS

_FILE_COLUMNS: Final = 120
# PASCAL first: its last fleet is reused by the others.
_COMPARISONS: Final[Mapping[str, Callable[[Bench], Awaitable[Sequence[Comparison]]]]] = {
    "pascal": pascal.run,
    "ares": ares.run,
    "cascade": cascade.run,
    "switch": switch.run,
    # Last, since their workers are configured differently.
    "arrow-prompts": arrow.run_prompts,
    "arrow-answers": arrow.run_answers,
}


async def run(names: Sequence[str], scale: Scale) -> list[Comparison]:
    """Run the named comparisons, one after another, on as few fleets as possible.

    Save the JSON of each, except on a quick run.
    """
    done: list[Comparison] = []
    async with Bench(scale) as bench:
        for name in names:
            progress(name)
            found = await _COMPARISONS[name](bench)
            done += found
            context: dict[str, object] = {
                "workers": WORKERS,
                "kv_tokens_a_worker": bench.kv_tokens,
            }
            if bench.references.seconds:
                context["undisturbed_tokens_per_s"] = bench.references.tokens_per_s
            if scale.keeps_results:
                for comparison in found:
                    save(f"real-{comparison.name}", context | comparison.json())
    return done


def main() -> int:
    """Run the comparisons; return 0 if every answer equals the undisturbed one."""
    parser = argparse.ArgumentParser(prog="python -m experiments.live.vllm", description=__doc__)
    parser.add_argument("comparisons", nargs="*", metavar="|".join(_COMPARISONS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="runs of seconds; figures are not reliable")
    parser.add_argument("--seeds", type=int, default=1, help="loads per contestant (default: 1)")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args()
    if unknown := set(options.comparisons) - _COMPARISONS.keys():
        parser.error(
            f"unknown comparison {', '.join(sorted(unknown))}; choose from {', '.join(_COMPARISONS)}"
        )
    names = [name for name in _COMPARISONS if name in options.comparisons or not options.comparisons]
    done = asyncio.run(run(names, Scale.quick() if options.quick else Scale.full(options.seeds)))
    if options.output == "json":
        print(json.dumps({"machine": machine(), **{each.name: each.json() for each in done}}))
    else:
        # The table is wider than the 80 columns that are assumed for files and pipes.
        console = Console() if sys.stdout.isatty() else Console(width=_FILE_COLUMNS)
        for each in done:
            console.print(each.table())
        console.print(summary(done))
    for each in done:
        for figures in each.runs:
            for line in figures.failed:
                print(f"WRONG {each.name}, {figures.contestant}, {figures.seed}: {line}", file=sys.stderr)
    return 0 if all(each.passed for each in done) else 1


if __name__ == "__main__":
    sys.exit(main())
