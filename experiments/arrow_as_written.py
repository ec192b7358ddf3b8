"""R5 and R7 of Arrow under what its paper leaves open or says otherwise than we do (docs/claims.md).

Each variant is searched for its sustainable rate as in the claims, for the policy and for Minimal Load:

- *as judged*: what the claims assume.
- *busy=decoding*: decode instances are busy if they decode anything (section 5.5, case 3, literally).
- *overhead*: milliseconds that an engine adds to each step. The paper built on a vLLM of early 2025 and does
  not report it; our step times are those of kernels, without it. It is assumed, so no row is judged by it.
- *queue*: a request whose KV waits for a decode instance makes no token and waits until there is room
  (equation 4 and section 5.4).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from experiments.claims.arrow.ablation import STARTS
from experiments.claims.arrow.cluster import (
    AS_JUDGED,
    CODE,
    CONVERSATION,
    MINIMAL_LOAD,
    SLO_AWARE,
    Engines,
    Trace,
)
from experiments.claims.arrow.rates import sustainable
from experiments.claims.base import Figures
from experiments.claims.verdicts import number
from simulator.estimate import estimate
from simulator.parallel import Task, run_tasks
from tests.harness.report import save

TRACES: Final[Mapping[str, Trace]] = {"code": CODE, "conversation": CONVERSATION}
_BUSY: Final = f"{SLO_AWARE} busy=decoding"


def variants(overhead_ms: float) -> dict[str, tuple[str, Engines]]:
    """Return each variant's policy and engines."""
    slow = Engines(overhead_ms)
    return {
        "as judged": (SLO_AWARE, AS_JUDGED),
        "busy=decoding": (_BUSY, AS_JUDGED),
        f"overhead {overhead_ms:g} ms": (SLO_AWARE, slow),
        f"overhead {overhead_ms:g} ms, busy=decoding": (_BUSY, slow),
        "queue": (SLO_AWARE, Engines(waits_paused=True)),
        "all three": (_BUSY, Engines(overhead_ms, waits_paused=True)),
    }


def _name(trace: str, policy: str, engines: Engines, start: float) -> str:
    return f"{trace} {policy} {engines} {start:.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="folder of the public traces")
    parser.add_argument("--only", nargs="+", choices=sorted(TRACES), default=sorted(TRACES))
    parser.add_argument("--starts", type=int, default=len(STARTS), help="starting points in the trace")
    parser.add_argument("--overhead-ms", type=float, default=10.0)
    parser.add_argument("--processes", type=int)
    options = parser.parse_args()
    starts = STARTS[: options.starts]
    chosen = variants(options.overhead_ms)
    pairs = dict.fromkeys(pair for own in chosen.values() for pair in (own, (MINIMAL_LOAD, own[1])))
    tasks = [
        Task(
            _name(trace, policy, engines, start),
            sustainable,
            (str(options.traces), TRACES[trace], policy, start, engines),
        )
        for trace in options.only
        for policy, engines in pairs
        for start in starts
    ]
    found: Mapping[str, Figures] = run_tasks(tasks, processes=options.processes)
    table = Table()
    for heading in ("trace", "variant", "SLO aware, requests/s", "Minimal Load", "ratio", "within"):
        table.add_column(heading)
    figures: dict[str, object] = {}
    for trace in options.only:
        for variant, (policy, engines) in chosen.items():
            rates = {
                name: [
                    number(found[_name(trace, name, engines, start)], "sustainable_per_s") for start in starts
                ]
                for name in (policy, MINIMAL_LOAD)
            }
            ratio = estimate([a / b for a, b in zip(rates[policy], rates[MINIMAL_LOAD], strict=True)])
            ours, base = (estimate(rates[name]).mean for name in (policy, MINIMAL_LOAD))
            within = "-" if ratio.half_width is None else f"{ratio.half_width:.2f}"
            table.add_row(trace, variant, f"{ours:.0f}", f"{base:.0f}", f"{ratio.mean:.2f}x", within)
            figures[f"{trace}, {variant}"] = {"slo_aware_per_s": ours, "minimal_load_per_s": base}
    console = Console(width=120)
    console.print(table)
    console.print(f"figures: {save('arrow_as_written', figures)}")


if __name__ == "__main__":
    main()
