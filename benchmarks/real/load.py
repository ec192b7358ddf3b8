"""An open-loop load from a seed: what is asked when does not depend on how the fleet does."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.loadgen import run_stream
from benchmarks.real.chat import Timing, chat_request, read_chat
from benchmarks.real.check import References
from benchmarks.real.fleet import Fleet
from benchmarks.real.prompts import longest, messages
from benchmarks.servers import MODEL
from tailrace.tiny.task import Task

# The pace of PASCAL's readers, and what the workers tell pacer slack by.
TPOT_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, `at_s` seconds after the load began."""

    at_s: float
    asked: Task


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one. `error`: why it is not equal; `timing`: None for one that did not end whole."""

    asked: Task
    equal: bool
    error: str
    timing: Timing | None


def poisson(tasks: Sequence[Task], rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals at `rate` a second, prompts drawn with equal chances."""
    draw = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s = draw.expovariate(rate)
    while at_s < seconds:
        arrivals.append(Arrival(at_s, draw.choice(tasks)))
        at_s += draw.expovariate(rate)
    return arrivals


async def offer(fleet: Fleet, arrivals: Sequence[Arrival], references: References) -> list[Outcome]:
    """Ask everything at its time, wait for every answer, compare each."""
    began_s = time.perf_counter()

    async def one(arrival: Arrival) -> Outcome:
        await asyncio.sleep(began_s + arrival.at_s - time.perf_counter())
        asked = arrival.asked
        request = chat_request(fleet.url, MODEL, messages(asked), longest([asked]))
        result = await run_stream(fleet.url, request, timeout_s=180.0)
        if result.error:
            return Outcome(asked, False, result.error, None)
        answer, timing = read_chat(result, TPOT_S)
        equal = references.same(asked, answer)
        return Outcome(asked, equal, "" if equal else f"another answer: {answer}", timing)

    return list(await asyncio.gather(*(one(arrival) for arrival in arrivals)))
