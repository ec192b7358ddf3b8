"""An open-loop load from a seed: arrivals do not depend on the fleet."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from experiments.live.vllm.chat import Timing, chat_request, read_chat
from experiments.live.vllm.check import References
from experiments.live.vllm.prompts import max_completion_tokens, messages
from tailrace.tiny.task import Task
from tests.harness.loadgen import run_stream
from tests.harness.servers import MODEL
from tests.harness.vllm_fleet import Fleet

# The reading pace of PASCAL, with which the workers compute pacer slack.
TPOT_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, `at_s` seconds after the load began."""

    at_s: float
    question: Task


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a request. `error`: why it is not equal; `timing`: None if it did not end normally."""

    question: Task
    equal: bool
    error: str
    timing: Timing | None


def poisson(tasks: Sequence[Task], rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return Poisson arrivals at `rate` per second, with prompts drawn uniformly."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        arrivals.append(Arrival(at_s, rng.choice(tasks)))
        at_s += rng.expovariate(rate)
    return arrivals


async def run_load(fleet: Fleet, arrivals: Sequence[Arrival], references: References) -> list[Outcome]:
    """Send every request at its time, wait for all answers, and compare each."""
    began_s = time.perf_counter()

    async def one(arrival: Arrival) -> Outcome:
        await asyncio.sleep(began_s + arrival.at_s - time.perf_counter())
        question = arrival.question
        request = chat_request(fleet.url, MODEL, messages(question), max_completion_tokens([question]))
        result = await run_stream(fleet.url, request, timeout_s=180.0)
        if result.error:
            return Outcome(question, False, result.error, None)
        answer, timing = read_chat(result, TPOT_S)
        equal = references.is_equal(question, answer)
        return Outcome(question, equal, "" if equal else f"another answer: {answer}", timing)

    return list(await asyncio.gather(*(one(arrival) for arrival in arrivals)))
