"""Measure the CPU time of a simulated engine per token: `python -m experiments.simulated_engine`.

Many engines run in one event loop, each with a few streams, stepping as fast as the loop permits; the sink
does only what a worker must.
"""

from __future__ import annotations

import asyncio
import resource
import time

import click
import msgspec
import uvloop

from tailrace.wire.requests import read_request
from worker_agent.engine.base import Frames, RequestKey, StepColumns, Submission
from worker_agent.engine.simulated import SimulatedEngine, SimulatedSettings


class _Counter:
    """Counts tokens and messages, and signals when all requests have finished."""

    def __init__(self, requests: int) -> None:
        self.tokens = 0
        self.messages = 0
        self.payload_bytes = 0
        self.done = asyncio.Event()
        self._left = requests

    def on_step(self, columns: StepColumns) -> None:
        self.tokens += len(columns.token_ids)
        self.messages += 1
        self.payload_bytes += len(columns.frames[0])
        self._left -= sum(flags & 1 for flags in columns.flags)
        if not self._left:
            self.done.set()

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        raise AssertionError("unexpected utility call")

    def on_engine_dead(self, reason: str) -> None:
        raise AssertionError(reason)


def request_frames(request_id: str, prompt: list[int], max_tokens: int) -> list[bytes]:
    """Return vLLM's message for a request that generates exactly max_tokens tokens."""
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "_eos_token_id": 258}
    return [msgspec.msgpack.encode([request_id, prompt, None, sampling, None, time.time(), None, None, None])]


async def _run(engines: int, streams: int, prompt_tokens: int, output_tokens: int, speed: float) -> None:
    counter = _Counter(engines * streams)
    fleet = [SimulatedEngine(SimulatedSettings(speed=speed)) for _ in range(engines)]
    for engine in fleet:
        await engine.start(counter)
    for number, engine in enumerate(fleet):
        for stream in range(streams):
            request_id = f"chatcmpl-{number:016x}{stream:016x}"
            prompt = [(number + stream + at) % 250 for at in range(prompt_tokens)]
            engine.submit(
                Submission(
                    RequestKey(0, number * streams + stream),
                    request_id,
                    0,
                    request_frames(request_id, prompt, output_tokens),
                )
            )
    cpu_s, wall_s = time.process_time(), time.monotonic()
    async with asyncio.timeout(600):
        await counter.done.wait()
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    for engine in fleet:
        await engine.stop()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    click.echo(
        f"{engines} engines x {streams} streams: {counter.tokens} tokens in {wall_s:.2f} s "
        f"({counter.tokens / wall_s:,.0f} tokens/s), {counter.tokens / cpu_s:,.0f} tokens per CPU second, "
        f"{cpu_s / counter.tokens * 1e6:.2f} us of CPU per token, "
        f"{cpu_s / counter.messages * 1e6:.1f} us per step, "
        f"{counter.payload_bytes / counter.tokens:.0f} bytes per token, {resident:.0f} MiB resident"
    )


@click.command()
@click.option("--engines", default=100, show_default=True)
@click.option("--streams", default=10, show_default=True, help="Streams per engine.")
@click.option("--prompt-tokens", default=256, show_default=True)
@click.option("--output-tokens", default=512, show_default=True)
@click.option(
    "--speed",
    default=1000.0,
    show_default=True,
    help="Faster than the CPU can follow, so that engines never idle.",
)
def main(engines: int, streams: int, prompt_tokens: int, output_tokens: int, speed: float) -> None:
    """Measure the simulated engine."""
    # Check that the messages can be read.
    read_request(request_frames("check", [1], 1))
    uvloop.run(_run(engines, streams, prompt_tokens, output_tokens, speed))


if __name__ == "__main__":
    main()
