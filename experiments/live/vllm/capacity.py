"""Measure a fleet's rate with full KV: the unit of the loads at which policies are compared.

Two streams per worker generate far fewer tokens than a full batch, by a factor that depends on the machine,
so multiples of that rate mean nothing. A load of 1.0 is the rate at which the fleet is just saturated with
its memory full.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Final

from experiments.live.vllm.chat import chat_request
from experiments.live.vllm.check import Disturbed
from experiments.live.vllm.plan import progress
from experiments.live.vllm.prompts import max_completion_tokens, messages, prompt_tokens
from tailrace.tiny.task import Task
from tests.harness.loadgen import run_stream
from tests.harness.servers import MODEL
from tests.harness.vllm_fleet import BLOCK_TOKENS, WORKERS, Fleet

# Multiple of what fits into the fleet's KV: requests wait throughout the measurement.
_BACKLOG: Final = 4
# Shares of finished requests between which the rate is measured.
_FIRST_COUNTED, _LAST_COUNTED = 0.25, 0.75
_DEADLINE_S: Final = 240.0


async def full_kv_rate(fleet: Fleet, tasks: Sequence[Task], kv_blocks: int) -> float:
    """Return the requests per second that the fleet completes while more wait than fit into its KV.

    `tasks` are used in turn. Raise Disturbed if a request fails.
    """
    mean = sum(prompt_tokens(each) + each.completion_tokens for each in tasks) / len(tasks)
    kv_requests = max(1.0, kv_blocks * BLOCK_TOKENS / mean) * WORKERS
    count = max(8, round(_BACKLOG * kv_requests))
    await fleet.clear()
    end_times: list[float] = []

    async def ask(question: Task) -> None:
        request = chat_request(fleet.url, MODEL, messages(question), max_completion_tokens([question]))
        result = await run_stream(fleet.url, request, timeout_s=_DEADLINE_S)
        if result.error:
            raise Disturbed(f"measuring the fleet's capacity: {question.prompt!r}: {result.error}")
        end_times.append(time.perf_counter())

    await asyncio.gather(*(ask(question) for question in itertools.islice(itertools.cycle(tasks), count)))
    end_times.sort()
    first, last = int(_FIRST_COUNTED * count), int(_LAST_COUNTED * count)
    rate = (last - first) / (end_times[last] - end_times[first])
    progress(f"  with its KV full the fleet completes {rate:.2f} requests/s ({count} submitted at once)")
    return rate
