"""`make bench-pull`: a prefix pulled from another real vLLM worker against one that is computed.

And a migration to a worker that holds the answer's beginning against one to a worker that does not.

Two workers with the tiny model, profiled first, as `tailrace profile` does it. Of each length, prompts are
computed on one worker, which then takes nothing new; asked again, they go to the other one, which computes
them, or pulls them (`pull_margin=0`), or does what `tailrace` decides by what it has measured. Each prompt is
asked again once. The ways take turns, so that what else the machine does falls on all of them. Answers are
compared.
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

from benchmarks.loadgen import percentile
from benchmarks.real.fleet import BLOCK_TOKENS, Engines, Fleet, running_fleet
from benchmarks.report import print_json, save
from tailrace.v1 import admin_pb2

LENGTHS: Final = (64, 128, 256, 512, 1_024, 1_536)
# Of each worker: so that nothing is evicted.
KV_BLOCKS: Final = 8_000
# How prompts are answered that another worker holds: the parameters of `tailrace`.
WAYS: Final[Mapping[str, Mapping[str, str]]] = {
    "computed": {"pulls": "false"},
    "pulled": {"pull_margin": "0"},
    "decided": {},
}
_CALL_S: Final = 60.0
# Prompts of one length and way that are asked before it is the next way's turn.
_TURN: Final = 5


@dataclass(frozen=True, slots=True)
class Turn:
    """Some prompts of one length, asked again one way. Seconds to the first chunk."""

    prompt_tokens: int
    equal: int
    seconds: Sequence[float]
    pulls: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One length, one way."""

    way: str
    prompt_tokens: int
    prompts: int
    equal: int
    ttft_p50_s: float
    ttft_p90_s: float
    pulls: int

    @staticmethod
    def of(way: str, turns: Sequence[Turn]) -> Outcome:
        """All its turns together."""
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
class Moved:
    """One migration of an answer that runs."""

    tokens: int
    held_bytes: int
    bytes: int
    pause_ms: float


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt and its answer."""

    answer: str
    prompt_tokens: int
    first_s: float


class Client:
    """Of one model."""

    def __init__(self, openai: AsyncOpenAI, model: str) -> None:
        self._openai = openai
        self._model = model

    async def ask(self, prompt: str) -> Asked:
        """A few tokens of an answer."""
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
        return Asked("".join(text), tokens, first_s)

    async def long(self, prompt: str, tokens: int) -> str:
        """An answer that takes a while."""
        reply = await self._openai.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0.0,
            extra_body={"min_tokens": tokens},
        )
        return reply.choices[0].text


@asynccontextmanager
async def emptied(fleet: Fleet, instance_id: str) -> AsyncIterator[None]:
    """It gets nothing new meanwhile."""
    await _drain(fleet, instance_id, undrain=False)
    try:
        yield
    finally:
        await _drain(fleet, instance_id, undrain=True)


async def _drain(fleet: Fleet, instance_id: str, undrain: bool) -> None:
    request = admin_pb2.DrainRequest(instance_id=instance_id, undrain=undrain)
    async for _ in fleet.admin.Drain(request, timeout=_CALL_S):
        pass


def prompt_of(name: str, tokens: int) -> str:
    """Byte-level: a letter is a token."""
    draw = random.Random(name)
    return f"{name} " + "".join(draw.choice("abcdefghij ") for _ in range(tokens - len(name) - 1))


async def pulls_of(fleet: Fleet) -> int:
    """Prefixes that have come to any worker."""
    return int((await fleet.counters()).pulled)


async def again(
    fleet: Fleet, client: Client, way: str, length: int, names: Sequence[str], holder: str, other: str
) -> Turn:
    """Prompts that `holder` has computed, asked of `other`."""
    texts = [prompt_of(f"{way} {length} {name}", length) for name in names]
    await fleet.set_policy("tailrace", WAYS[way])
    known = (await fleet.instances())[holder].cached_blocks
    async with emptied(fleet, other):
        first = [await client.ask(text) for text in texts]
    blocks = sum((asked.prompt_tokens - 1) // BLOCK_TOKENS for asked in first)
    await _until_known(fleet, holder, known + blocks)
    before = await pulls_of(fleet)
    async with emptied(fleet, holder):
        second = [await client.ask(text) for text in texts]
    return Turn(
        prompt_tokens=first[0].prompt_tokens,
        equal=sum(a.answer == b.answer for a, b in zip(first, second, strict=True)),
        seconds=[asked.first_s for asked in second],
        pulls=await pulls_of(fleet) - before,
    )


async def _until_known(fleet: Fleet, holder: str, blocks: int) -> None:
    """Until the scheduler knows of so many there."""
    async with asyncio.timeout(_CALL_S):
        while (await fleet.instances())[holder].cached_blocks < blocks:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)


async def moved(
    fleet: Fleet, client: Client, length: int, holder: str, other: str
) -> tuple[list[Moved], bool]:
    """An answer to a prompt of this length goes there, back and there again; whether it stayed the same."""
    text = prompt_of(f"moved {length}", length)
    async with emptied(fleet, other):
        running = asyncio.create_task(client.long(text, 400))
        while not (listed := await _running(fleet)):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        moves: list[Moved] = []
    for target in (other, holder, other):
        request = admin_pb2.AdminMigrateRequest(
            request_id=listed[0], target_instance_id=target, reason="bench"
        )
        records = [record async for record in fleet.admin.Migrate(request, timeout=_CALL_S)]
        record = records[-1]
        moves.append(Moved(record.tokens, record.held_bytes, record.bytes, record.pause_ms))
    alone = await client.long(text, 400)
    return moves, await running == alone


async def _running(fleet: Fleet) -> list[str]:
    reply = await fleet.admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=_CALL_S)
    return [request.request_id for request in reply.requests if request.output_tokens > 5]


async def measure(prompts: int, console: Console) -> tuple[list[Outcome], list[Moved]]:
    """All on one fleet."""
    turns: dict[tuple[int, str], list[Turn]] = {}
    async with running_fleet(Engines(kv_blocks=KV_BLOCKS, max_len=2_048, workers=2)) as fleet:
        holder, other = sorted(await fleet.instances())
        async with AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=_CALL_S) as openai:
            client = Client(openai, (await openai.models.list()).data[0].id)
            for number in range(20):
                await client.ask(prompt_of(f"warm up {number}", 500))
            # What `decided` goes by: step times, and how fast KV came.
            await fleet.profile()
            await again(fleet, client, "pulled", 1_000, ["warm up"], holder, other)
            for begin in range(0, prompts, _TURN):
                names = [str(number) for number in range(begin, min(prompts, begin + _TURN))]
                for length in LENGTHS:
                    for way in WAYS:
                        turn = await again(fleet, client, way, length, names, holder, other)
                        turns.setdefault((length, way), []).append(turn)
                console.print(f"{begin + len(names)} of {prompts} prompts of each length and way")
            outcomes = [Outcome.of(way, turns[length, way]) for way in WAYS for length in LENGTHS]
            moves, equal = await moved(fleet, client, 1_200, holder, other)
            if not equal:
                raise RuntimeError("an answer changed on its way")
    return outcomes, moves


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row a length."""
    result = Table(title="Prompts that another vLLM worker holds: time to the first token, P50 ms (P90)")
    result.add_column("prompt tokens", justify="right")
    for way in WAYS:
        result.add_column(way, justify="right")
    result.add_column("of them pulled", justify="right")
    for length in sorted({outcome.prompt_tokens for outcome in outcomes}):
        row = {o.way: o for o in outcomes if o.prompt_tokens == length}
        cells = [f"{1e3 * row[w].ttft_p50_s:.1f} ({1e3 * row[w].ttft_p90_s:.1f})" for w in WAYS]
        result.add_row(str(length), *cells, f"{row['decided'].pulls} of {row['decided'].prompts}")
    return result


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the benchmark; returns where the figures are."""
    parser = argparse.ArgumentParser(prog="make bench-pull", description=__doc__)
    parser.add_argument("--prompts", type=int, default=15, help="of each length and way")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    given = parser.parse_args(arguments)
    console = Console(stderr=True)
    outcomes, moves = asyncio.run(measure(given.prompts, console))
    figures: dict[str, object] = {
        "runs": [asdict(outcome) for outcome in outcomes],
        "moves": [asdict(each) for each in moves],
    }
    path = save("pull", figures)
    if given.output == "json":
        print_json("pull", figures)
    else:
        printed = Console(width=None if sys.stdout.isatty() else 120)
        printed.print(table(outcomes))
        equal, asked = sum(o.equal for o in outcomes), sum(o.prompts for o in outcomes)
        printed.print(f"answers equal: {equal} of {asked}")
        for each in moves:
            moved_at = f"moved after {each.tokens} tokens of output"
            printed.print(f"{moved_at}: {each.bytes} bytes, {each.held_bytes} held there")
    console.print(f"saved to {path}")
    return path


if __name__ == "__main__":
    main()
