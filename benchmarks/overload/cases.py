"""The parts of the benchmark, each with the cases that it compares."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from benchmarks.overload.figures import LoadFigures, Ratio, at_random, evenly, ttfts_of
from benchmarks.overload.front_end import FAIR_BACKLOG_TOKENS, LIMIT_PER_MINUTE, FrontEndClient
from benchmarks.overload.largest import Sent, kinds_named
from tests.harness.loadgen import StreamResult, percentile, run_stream
from tests.harness.servers import TailraceCluster

TTFT_SLO_S = 2.0
# Prompts that one tenant sends at once.
BURST = 60
# Of the fourth part: the engines' speed, and the requests of the tenant that sends small ones.
FAST, SMALL_TOKENS, SMALL_PER_S = 20.0, 100, 12.0


@dataclass(frozen=True, slots=True)
class Isolation:
    """The first part's figures: of the tenant within its limit, of the other one, and how they compare."""

    own: list[LoadFigures]
    other: list[LoadFigures]
    ratios: list[Ratio]
    refusal_cpu_ms: float


async def beside_another_tenant(
    front_end: FrontEndClient, capacity: float, seconds: float, turns: int, factor: float, console: Console
) -> Isolation:
    """Run the first part."""
    limit = LIMIT_PER_MINUTE / 60
    alone, within, beyond = "alone", "beside one at its limit", f"beside one at {factor:g} times its limit"
    own: dict[str, list[list[StreamResult]]] = {case: [] for case in (alone, within, beyond)}
    other: dict[str, list[StreamResult]] = {case: [] for case in (within, beyond)}
    for turn in range(turns):
        for case in own:
            console.print(f"  turn {turn + 1}: {case}", style="dim")
            times = {
                alone: iter(()),
                within: evenly(limit, seconds),
                beyond: at_random(factor * limit, seconds, 1_000 + turn),
            }[case]
            async with asyncio.TaskGroup() as group:
                patient = group.create_task(front_end.send("patient", at_random(capacity / 2, seconds, turn)))
                greedy = group.create_task(front_end.send("greedy", times))
            own[case].append(patient.result())
            if case in other:
                other[case] += greedy.result()
    ttfts = {case: [ttfts_of(results) for results in by_turn] for case, by_turn in own.items()}
    return Isolation(
        [
            LoadFigures.of(case, capacity / 2, [result for results in by_turn for result in results])
            for case, by_turn in own.items()
        ],
        [
            LoadFigures.of(case, rate, results)
            for (case, results), rate in zip(other.items(), (limit, factor * limit), strict=True)
        ],
        [
            Ratio.of(case, base, list(zip(ttfts[case], ttfts[base], strict=True)))
            for case, base in ((beyond, within), (beyond, alone), (within, alone))
        ],
        1_000 * await front_end.refusal_cpu_s("greedy"),
    )


async def beside_a_burst(
    front_end: FrontEndClient,
    fair_front: FrontEndClient,
    capacity: float,
    seconds: float,
    turns: int,
    console: Console,
) -> list[LoadFigures]:
    """Run the second part."""
    results_by_case: dict[str, list[StreamResult]] = {}
    for turn in range(turns):
        for case, front, prompts in (
            ("alone", front_end, 0),
            (f"beside {BURST} prompts at once", front_end, BURST),
            (f"the same, --fair-backlog {FAIR_BACKLOG_TOKENS}", fair_front, BURST),
        ):
            console.print(f"  turn {turn + 1}: {case}", style="dim")
            async with asyncio.TaskGroup() as group:
                patient = group.create_task(front.send("patient", at_random(capacity / 2, seconds, turn)))
                await asyncio.sleep(seconds / 4)
                for _ in range(prompts):
                    group.create_task(run_stream(front.url, front.request("bursty"), 120))
            results_by_case.setdefault(case, []).extend(patient.result())
    return [LoadFigures.of(case, capacity / 2, results) for case, results in results_by_case.items()]


@dataclass(frozen=True, slots=True)
class LargeFigures:
    """The fourth part's figures for one kind: its size, answers by status, and what they cost the other."""

    kind: str
    size: int
    unit: str
    statuses: dict[int, int]
    failed: int
    alone_p99_s: float
    p99_s: float
    ratio: Ratio
    resident_mib: float


async def beside_large_requests(
    front_end: FrontEndClient,
    names: Sequence[str],
    small_tokens: int,
    seconds: float,
    turns: int,
    console: Console,
) -> list[LargeFigures]:
    """Run the fourth part with the kinds whose names contain one of `names`."""
    # The sizes are found without a limit on their number.
    kinds, client, finder = (
        kinds_named(names),
        front_end.large_client("large"),
        front_end.large_client("bursty"),
    )
    ttfts: dict[str, list[list[float]]] = {}
    sent: dict[str, Sent] = {}
    failed: dict[str, int]
    resident, failed = dict.fromkeys((kind.name for kind in kinds), 0.0), {}
    try:
        sizes = {kind.name: await finder.largest(kind) for kind in kinds}
        for turn in range(turns):
            for kind in (None, *kinds):
                case = "" if kind is None else kind.name
                console.print(f"  turn {turn + 1}: {case or 'alone'}", style="dim")
                async with asyncio.TaskGroup() as group:
                    small = group.create_task(
                        front_end.send("patient", at_random(SMALL_PER_S, seconds, turn), small_tokens)
                    )
                    if kind is not None:
                        attack = group.create_task(client.attack(kind, sizes[case], seconds))
                        while not attack.done():
                            resident[case] = max(resident[case], front_end.resident_mib())
                            await asyncio.wait([attack], timeout=0.5)
                        one = attack.result()
                        known = sent.setdefault(case, Sent(one.size))
                        for status, count in one.statuses.items():
                            known.statuses[status] = known.statuses.get(status, 0) + count
                results = small.result()
                ttfts.setdefault(case, []).append([result.ttft for result in results])
                failed[case] = failed.get(case, 0) + len(results) - len(ttfts_of(results))
                # Wait until the front end is done with what it still has of it.
                await front_end.send("patient", [2.0, 2.1, 2.2], small_tokens)
    finally:
        client.close()
        finder.close()
    return [
        LargeFigures(
            kind.name,
            sizes[kind.name],
            kind.unit,
            sent[kind.name].statuses,
            failed[kind.name],
            percentile([ttft for turn in ttfts[""] for ttft in turn], 0.99),
            percentile([ttft for turn in ttfts[kind.name] for ttft in turn], 0.99),
            Ratio.of(kind.name, "alone", list(zip(ttfts[kind.name], ttfts[""], strict=True))),
            resident[kind.name],
        )
        for kind in kinds
    ]


async def overload_all(
    front_end: FrontEndClient,
    cluster: TailraceCluster,
    capacity: float,
    seconds: float,
    admit: float,
    console: Console,
) -> list[LoadFigures]:
    """Run the third part."""
    loads = []
    for case, rate, factor in (
        ("half of capacity", 0.5 * capacity, 0.0),
        ("three times capacity, everybody admitted", 3 * capacity, 0.0),
        (f"three times capacity, admit={admit:g}", 3 * capacity, admit),
    ):
        console.print(f"  {case}", style="dim")
        await asyncio.to_thread(_set_slo, cluster.admin, factor)
        loads.append(LoadFigures.of(case, rate, await front_end.send("patient", at_random(rate, seconds, 7))))
    return loads


def _set_slo(admin: str, admit: float) -> None:
    command = [sys.executable, "-m", "tailrace", "set", "slo", f"ttft={TTFT_SLO_S}", f"admit={admit}"]
    environment = {**os.environ, "TAILRACE_ADMIN": admin}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, timeout=60)
