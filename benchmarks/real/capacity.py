"""What a fleet makes with its KV full: the unit of the loads at which policies are compared.

Two streams a worker make far fewer tokens than a full batch, and how many more differs between machines, so
that a multiple of that says nothing. 1.0 here is the rate at which the fleet is just busy with its memory
full.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Final

from benchmarks.loadgen import run_stream
from benchmarks.real.chat import chat_request
from benchmarks.real.check import Disturbed
from benchmarks.real.fleet import BLOCK_TOKENS, WORKERS, Fleet
from benchmarks.real.plan import progress
from benchmarks.real.prompts import longest, messages, prompt_tokens
from benchmarks.servers import MODEL
from tailrace.tiny.task import Task

# Times what the fleet's KV holds: there are requests waiting during the whole measurement.
_BACKLOG: Final = 4
# Of the requests that ended: from the first of these to the second.
_FROM, _TO = 0.25, 0.75
_DEADLINE_S: Final = 240.0


async def full_kv_rate(fleet: Fleet, tasks: Sequence[Task], kv_blocks: int) -> float:
    """Requests a second, of `tasks` in turn, that the fleet completes while more wait than its KV holds.

    Raises Disturbed when a request fails.
    """
    mean = sum(prompt_tokens(each) + each.completion_tokens for each in tasks) / len(tasks)
    holds = max(1.0, kv_blocks * BLOCK_TOKENS / mean) * WORKERS
    count = max(8, round(_BACKLOG * holds))
    await fleet.clear()
    ended: list[float] = []

    async def ask(asked: Task) -> None:
        request = chat_request(fleet.url, MODEL, messages(asked), longest([asked]))
        result = await run_stream(fleet.url, request, timeout_s=_DEADLINE_S)
        if result.error:
            raise Disturbed(f"measuring the fleet's capacity: {asked.prompt!r}: {result.error}")
        ended.append(time.perf_counter())

    await asyncio.gather(*(ask(asked) for asked in itertools.islice(itertools.cycle(tasks), count)))
    ended.sort()
    first, last = int(_FROM * count), int(_TO * count)
    rate = (last - first) / (ended[last] - ended[first])
    progress(f"  with its KV full the fleet completes {rate:.2f} requests/s ({count} asked at once)")
    return rate
