"""Pull a prefix from another real vLLM worker, compared with computing it.

Also compare migrations to a worker with a cached prefix of the answer and to one without.

Two workers have the tiny model and are profiled first, as by `tailrace profile`. Prompts of each length are
computed on one worker, which is then drained; repeated, they go to the other one, which computes them, pulls
them
(`pull_margin=0`), or does what `tailrace` decides from its measurements. Each prompt is repeated once. The
modes alternate, so that other load on the machine affects all of them. Answers are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from tailrace.v1 import admin_pb2
from tests.harness.loadgen import percentile
from tests.harness.report import print_json, save
from tests.harness.vllm_fleet import BLOCK_TOKENS, Engines, Fleet, running_fleet

LENGTHS: Final = (64, 128, 256, 512, 1_024, 1_536)
# Per worker: enough that nothing is evicted.
KV_BLOCKS: Final = 8_000
# Parameters of `tailrace` for prompts that another worker has cached.
WAYS: Final[Mapping[str, Mapping[str, str]]] = {
    "computed": {"pulls": "false"},
    "pulled": {"pull_margin": "0"},
    "decided": {},
}
_CALL_S: Final = 60.0
# Prompts of one length and mode before the next mode's turn.
_PROMPTS_PER_TURN: Final = 5


@dataclass(frozen=True, slots=True)
class Turn:
    """Some prompts of one length, repeated in one mode. Seconds to the first chunk."""

    prompt_tokens: int
    equal: int
    seconds: Sequence[float]
    pulls: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one length and mode."""

    way: str
    prompt_tokens: int
    prompts: int
    equal: int
    ttft_p50_s: float
    ttft_p90_s: float
    pulls: int

    @staticmethod
    def of(way: str, turns: Sequence[Turn]) -> Outcome:
        """Aggregate all turns."""
        seconds = [each for turn in turns for each in turn.seconds]
        return Outcome(
            way=way,
            prompt_tokens=turns[0].prompt_tokens,
            prompts=len(seconds),
            equal=sum(turn.equal for turn in turns),
            ttft_p50_s=percentile(seconds, 0.5),
            ttft_p90_s=percentile(seconds, 0.9),
            pulls=sum(turn.pulls for turn in turns),
        )


@dataclass(frozen=True, slots=True)
class Migration:
    """One migration of a running answer."""

    tokens: int
    held_bytes: int
    bytes: int
    pause_ms: float


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of a prompt."""

    answer: str
    prompt_tokens: int
    first_s: float


class Client:
    """A client of one model."""

    def __init__(self, openai: AsyncOpenAI, model: str) -> None:
        self._openai = openai
        self._model = model

    async def ask(self, prompt: str) -> Completion:
        """Complete a prompt with a few tokens."""
        began_s = time.perf_counter()
        first_s = 0.0
        text: list[str] = []
        tokens = 0
        stream = await self._openai.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=4,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            first_s = first_s or time.perf_counter() - began_s
            text.extend(choice.text for choice in chunk.choices)
            if chunk.usage is not None:
                tokens = chunk.usage.prompt_tokens
        return Completion("".join(text), tokens, first_s)

    async def complete_long(self, prompt: str, tokens: int) -> str:
        """Complete a prompt with many tokens."""
        reply = await self._openai.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0.0,
            extra_body={"min_tokens": tokens},
        )
        return reply.choices[0].text


@asynccontextmanager
async def drained(fleet: Fleet, instance_id: str) -> AsyncIterator[None]:
    """Drain an instance for the block."""
    await _drain(fleet, instance_id, undrain=False)
    try:
        yield
    finally:
        await _drain(fleet, instance_id, undrain=True)


async def _drain(fleet: Fleet, instance_id: str, undrain: bool) -> None:
    request = admin_pb2.DrainRequest(instance_id=instance_id, undrain=undrain)
    async for _ in fleet.admin.Drain(request, timeout=_CALL_S):
        pass


def make_prompt(name: str, tokens: int) -> str:
    """Return a prompt of this many tokens (byte-level: one per character)."""
    rng = random.Random(name)
    return f"{name} " + "".join(rng.choice("abcdefghij ") for _ in range(tokens - len(name) - 1))


async def count_pulls(fleet: Fleet) -> int:
    """Return how many prefixes workers have pulled."""
    return int((await fleet.counters()).pulled)


async def run_repeated(
    fleet: Fleet, client: Client, way: str, length: int, names: Sequence[str], holder: str, other: str
) -> Turn:
    """Run prompts on `holder`, and again on `other`; return figures of the repetition."""
    texts = [make_prompt(f"{way} {length} {name}", length) for name in names]
    await fleet.set_policy("tailrace", WAYS[way])
    cached_before = (await fleet.instances())[holder].cached_blocks
    async with drained(fleet, other):
        first = [await client.ask(text) for text in texts]
    blocks = sum((completion.prompt_tokens - 1) // BLOCK_TOKENS for completion in first)
    await _wait_until_known(fleet, holder, cached_before + blocks)
    before = await count_pulls(fleet)
    async with drained(fleet, holder):
        second = [await client.ask(text) for text in texts]
    return Turn(
        prompt_tokens=first[0].prompt_tokens,
        equal=sum(a.answer == b.answer for a, b in zip(first, second, strict=True)),
        seconds=[completion.first_s for completion in second],
        pulls=await count_pulls(fleet) - before,
    )


async def _wait_until_known(fleet: Fleet, holder: str, blocks: int) -> None:
    """Wait until the scheduler knows of this many blocks on the instance. Raise TimeoutError if it does not
    in time."""
    async with asyncio.timeout(_CALL_S):
        while (await fleet.instances())[holder].cached_blocks < blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def migrate_answer(
    fleet: Fleet, client: Client, length: int, holder: str, other: str
) -> tuple[list[Migration], bool]:
    """Migrate a running answer to the other worker, back and again; return the migrations, and whether the
    answer is unchanged."""
    text = make_prompt(f"moved {length}", length)
    async with drained(fleet, other):
        running = asyncio.create_task(client.complete_long(text, 400))
        while not (running_ids := await _running(fleet)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        moves: list[Migration] = []
    for target in (other, holder, other):
        request = admin_pb2.AdminMigrateRequest(
            request_id=running_ids[0], target_instance_id=target, reason="bench"
        )
        records = [record async for record in fleet.admin.Migrate(request, timeout=_CALL_S)]
        record = records[-1]
        moves.append(Migration(record.tokens, record.held_bytes, record.bytes, record.pause_ms))
    alone = await client.complete_long(text, 400)
    return moves, await running == alone


async def _running(fleet: Fleet) -> list[str]:
    reply = await fleet.admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=_CALL_S)
    return [request.request_id for request in reply.requests if request.output_tokens > 5]


async def measure(prompts: int, console: Console) -> tuple[list[Outcome], list[Migration]]:
    """Run everything on one fleet. Raise RuntimeError if a migrated answer changes."""
    turns: dict[tuple[int, str], list[Turn]] = {}
    async with running_fleet(Engines(kv_blocks=KV_BLOCKS, max_len=2_048, workers=2)) as fleet:
        holder, other = sorted(await fleet.instances())
        async with AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=_CALL_S) as openai:
            client = Client(openai, (await openai.models.list()).data[0].id)
            for number in range(20):
                await client.ask(make_prompt(f"warm up {number}", 500))
            # `decided` uses measured step times and transfer rates.
            await fleet.profile()
            await run_repeated(fleet, client, "pulled", 1_000, ["warm up"], holder, other)
            for begin in range(0, prompts, _PROMPTS_PER_TURN):
                names = [str(number) for number in range(begin, min(prompts, begin + _PROMPTS_PER_TURN))]
                for length in LENGTHS:
                    for way in WAYS:
                        turn = await run_repeated(fleet, client, way, length, names, holder, other)
                        turns.setdefault((length, way), []).append(turn)
                console.print(f"{begin + len(names)} of {prompts} prompts per length and mode")
            outcomes = [Outcome.of(way, turns[length, way]) for way in WAYS for length in LENGTHS]
            moves, equal = await migrate_answer(fleet, client, 1_200, holder, other)
            if not equal:
                raise RuntimeError("an answer was changed by migration")
    return outcomes, moves


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one row per length."""
    result = Table(title="Prompts cached on another vLLM worker: TTFT, P50 ms (P90)")
    result.add_column("prompt tokens", justify="right")
    for way in WAYS:
        result.add_column(way, justify="right")
    result.add_column("pulled when decided", justify="right")
    for length in sorted({outcome.prompt_tokens for outcome in outcomes}):
        row = {o.way: o for o in outcomes if o.prompt_tokens == length}
        cells = [f"{1e3 * row[w].ttft_p50_s:.1f} ({1e3 * row[w].ttft_p90_s:.1f})" for w in WAYS]
        result.add_row(str(length), *cells, f"{row['decided'].pulls} of {row['decided'].prompts}")
    return result


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the benchmark; return the path of the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache.pull", description=__doc__)
    parser.add_argument("--prompts", type=int, default=15, help="per length and mode")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    outcomes, moves = asyncio.run(measure(options.prompts, console))
    figures: dict[str, object] = {
        "runs": [asdict(outcome) for outcome in outcomes],
        "moves": [asdict(each) for each in moves],
    }
    path = save("pull", figures)
    if options.output == "json":
        print_json("pull", figures)
    else:
        printed = Console(width=None if sys.stdout.isatty() else 120)
        printed.print(table(outcomes))
        equal, completion = sum(o.equal for o in outcomes), sum(o.prompts for o in outcomes)
        printed.print(f"answers equal: {equal} of {completion}")
        for each in moves:
            moved_at = f"migrated after {each.tokens} output tokens"
            printed.print(f"{moved_at}: {each.bytes} bytes, {each.held_bytes} cached on the target")
    console.print(f"saved to {path}")
    return path


if __name__ == "__main__":
    main()
