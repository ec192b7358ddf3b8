"""Conversations on two real vLLM workers, with placement by cached prefix and without.

A closed loop of users, each with one conversation of five turns after another, which begin with a shared
system prompt. Each policy has its own conversations, so that it begins with no cached prefix but the shared
one, and runs twice, alternating with the others. Cached tokens are as counted by vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from benchmarks.cache.conversations import TURNS, Users, later_ttfts_s
from tests.harness.loadgen import percentile
from tests.harness.report import print_json, save, table_console
from tests.harness.vllm_fleet import Engines, Fleet, running_fleet

POLICIES: Final = ("round_robin", "least_loaded", "session", "prefix_affinity", "tailrace")
ROUNDS: Final = 2
_SETTLE_S: Final = 10.0
_CALL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one policy in one round."""

    policy: str
    round: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    # Seconds to the first chunk of the answer, without the first turn of each conversation.
    ttft_p50_s: float
    ttft_p90_s: float


async def prompt_counters(fleet: Fleet) -> tuple[int, int]:
    """Return (prompt tokens, cached ones) of all workers, as last reported."""
    instances = (await fleet.instances()).values()
    return sum(i.prompt_tokens for i in instances), sum(i.cached_prompt_tokens for i in instances)


async def wait_for_settled_counters(fleet: Fleet) -> tuple[int, int]:
    """Return the counters once two consecutive reports agree. Raise TimeoutError if none do."""
    async with asyncio.timeout(_SETTLE_S):
        before = await prompt_counters(fleet)
        while True:
            await asyncio.sleep(1.0)
            now = await prompt_counters(fleet)
            if now == before:
                return now
            before = now


async def measure(users: int, conversations: int, console: Console) -> list[Outcome]:
    """Run all policies on one fleet."""
    outcomes: list[Outcome] = []
    async with running_fleet(Engines(kv_blocks=400, max_len=2_048, workers=2)) as fleet:
        async with AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=_CALL_S) as openai:
            model = (await openai.models.list()).data[0].id
        loop = Users(fleet.url, model, users, conversations)
        await loop.run("warm up")
        for number in range(ROUNDS):
            for policy in POLICIES:
                await fleet.set_policy(policy)
                before = await wait_for_settled_counters(fleet)
                seconds = later_ttfts_s(await loop.run(f"{policy} {number}"))
                after = await wait_for_settled_counters(fleet)
                outcomes.append(
                    Outcome(
                        policy=policy,
                        round=number,
                        requests=conversations * TURNS,
                        prompt_tokens=after[0] - before[0],
                        cached_tokens=after[1] - before[1],
                        ttft_p50_s=percentile(seconds, 0.5),
                        ttft_p90_s=percentile(seconds, 0.9),
                    )
                )
                console.print(outcomes[-1])
    return outcomes


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one row per policy and both rounds in each cell."""
    result = Table(title="Conversations on two real vLLM workers, round by round")
    result.add_column("policy", no_wrap=True)
    for heading in ("cached %", "TTFT P50 ms", "TTFT P90 ms"):
        result.add_column(heading, justify="right")
    for policy in POLICIES:
        rounds = [o for o in outcomes if o.policy == policy]
        result.add_row(
            policy,
            " / ".join(f"{100 * o.cached_tokens / max(1, o.prompt_tokens):.1f}" for o in rounds),
            " / ".join(f"{1e3 * o.ttft_p50_s:.0f}" for o in rounds),
            " / ".join(f"{1e3 * o.ttft_p90_s:.0f}" for o in rounds),
        )
    return result


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the benchmark; return the path of the figures."""
    parser = argparse.ArgumentParser(prog="python -m experiments.cache.policies", description=__doc__)
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=24, help="per policy and round")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    outcomes = asyncio.run(measure(options.users, options.conversations, console))
    figures: dict[str, object] = {"users": options.users, "runs": [asdict(outcome) for outcome in outcomes]}
    path = save("cache-live", figures)
    if options.output == "json":
        print_json("cache-live", figures)
    else:
        table_console(120).print(table(outcomes))
    console.print(f"saved to {path}")
    return path


if __name__ == "__main__":
    main()
