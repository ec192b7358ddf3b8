"""Conversations on two real vLLM engines behind Tailrace, and on two behind vLLM's
router (https://pypi.org/project/vllm-router), which also places by cached prefix.

The engines are configured alike, the API servers are vLLM's Python ones, the load is a closed loop of users.
Both fleets run at once and are loaded alternately; runs with the same number send the same requests, so that
answers can be compared. Cached tokens are as reported by the servers (`prompt_tokens_details`).

The router is not part of Tailrace: `pip install --target DIR vllm-router`, then `--router DIR`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from benchmarks.cache.conversations import Turn, Users, later_ttfts_s
from tailrace.local.ports import free_ports
from tailrace.tiny import MODEL_PATH, REASONING_PARSER
from tests.harness.loadgen import percentile
from tests.harness.report import print_json, save, table_console
from tests.harness.servers import MODEL, ServeProcess, wait_until_up
from tests.harness.vllm_fleet import BLOCK_TOKENS, Engines, running_fleet

# Policies of Tailrace and of the router. Those at the same position get the same requests.
TAILRACE: Final = ("tailrace", "prefix_affinity", "least_loaded")
ROUTER: Final = ("cache_aware", "kv_aware", "round_robin")
_ENGINES: Final = Engines(kv_blocks=400, max_len=2_048, workers=2)
_ANSWER_TOKENS: Final = 8
_START_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one policy in one round. `different`: answers that differ from the policy it is compared
    with."""

    fleet: str
    policy: str
    round: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    ttft_p50_s: float
    ttft_p90_s: float
    different: int


class PlainServer(ServeProcess):
    """`vllm serve` with a worker's engine settings; publishes KV events at `events`."""

    def __init__(self, number: int) -> None:
        (port,) = free_ports(1)
        self.events = f"tcp://127.0.0.1:{port}"
        options = ["--served-model-name", MODEL, "--reasoning-parser", REASONING_PARSER]
        options += ["--enforce-eager", "--dtype", "float32", "--distributed-executor-backend", "uni"]
        options += ["--no-async-scheduling", "--enable-prompt-tokens-details"]
        options += ["--num-gpu-blocks-override", str(_ENGINES.kv_blocks), "--block-size", str(BLOCK_TOKENS)]
        options += ["--max-model-len", str(_ENGINES.max_len), "--max-num-seqs", "32"]
        options += ["--uvicorn-log-level", "warning"]
        events_config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events}
        options += ["--kv-events-config", json.dumps(events_config)]
        environment = {
            # Without this vLLM replaces `uni` by `mp`, which spins on shared memory on two cores.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
        }
        super().__init__(f"plain server {number}", MODEL_PATH, options, environment)


@contextmanager
def router(folder: Path, policy: str, servers: Sequence[PlainServer]) -> Iterator[str]:
    """Run vLLM's router for these servers, from the packages in `folder`; yield its URL."""
    port, metrics = free_ports(2)
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", policy, "--prometheus-port", str(metrics), "--log-level", "warning"]
    command += ["--worker-urls", *(server.url for server in servers)]
    if policy == "kv_aware":
        command += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", str(MODEL_PATH)]
        for server in servers:
            command += ["--kv-event-source", f"{server.url}={server.events}"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not wait_until_up(f"{url}/v1/models", process, _START_S):
                log.seek(0)
                last = log.read().decode(errors="replace")[-3_000:]
                raise RuntimeError(f"the router did not start ({policy}):\n{last}")
            yield url
        finally:
            process.terminate()
            process.wait(timeout=30)


def make_outcome(
    fleet: str, policy: str, number: int, turns: Sequence[Turn], others: Sequence[Turn] = ()
) -> Outcome:
    """Aggregate the turns of a run; `others`: the same requests on the other fleet."""
    reference_answers = {(turn.conversation, turn.number): turn.answer for turn in others}
    ttfts = later_ttfts_s(list(turns))
    return Outcome(
        fleet,
        policy,
        number,
        len(turns),
        sum(turn.prompt_tokens for turn in turns),
        sum(turn.cached_tokens for turn in turns),
        percentile(ttfts, 0.5),
        percentile(ttfts, 0.9),
        sum(reference_answers.get((t.conversation, t.number), t.answer) != t.answer for t in turns),
    )


async def measure(
    folder: Path, users: int, conversations: int, rounds: int, console: Console
) -> list[Outcome]:
    """Run both fleets, alternately."""
    outcomes: list[Outcome] = []
    with ExitStack() as plain:
        console.print("starting two plain servers, their routers, and Tailrace", style="dim")
        servers = [plain.enter_context(PlainServer(number)) for number in range(_ENGINES.workers)]
        routers = {policy: plain.enter_context(router(folder, policy, servers)) for policy in ROUTER}
        front = ("python", ["--enable-prompt-tokens-details"])
        async with running_fleet(_ENGINES, *front) as fleet:
            async with AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none") as openai:
                model = (await openai.models.list()).data[0].id

            def loop(url: str, name: str) -> Users:
                return Users(url, name, users, conversations, _ANSWER_TOKENS)

            for url, name in ((fleet.url, model), *((url, MODEL) for url in routers.values())):
                await loop(url, name).run("warm up")
            for number in range(rounds):
                for own_policy, router_policy in zip(TAILRACE, ROUTER, strict=True):
                    run = f"{own_policy} {number}"
                    await fleet.set_policy(own_policy)
                    own_turns = await loop(fleet.url, model).run(run)
                    router_turns = await loop(routers[router_policy], MODEL).run(run)
                    outcomes.append(make_outcome("tailrace", own_policy, number, own_turns))
                    outcomes.append(
                        make_outcome("vllm-router", router_policy, number, router_turns, own_turns)
                    )
                    for each in outcomes[-2:]:
                        console.print(each, style="dim")
    return outcomes


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one row per policy and all rounds in each cell."""
    result = Table(title="Conversations on two real vLLM engines, round by round")
    result.add_column("placed by", no_wrap=True)
    for heading in ("cached %", "TTFT P50 ms", "TTFT P90 ms", "different answers"):
        result.add_column(heading, justify="right")
    groups: Mapping[str, Sequence[str]] = {"tailrace": TAILRACE, "vllm-router": ROUTER}
    for fleet, policies in groups.items():
        for policy in policies:
            rounds = [o for o in outcomes if (o.fleet, o.policy) == (fleet, policy)]
            result.add_row(
                f"{fleet}: {policy}",
                " / ".join(f"{100 * o.cached_tokens / max(1, o.prompt_tokens):.1f}" for o in rounds),
                " / ".join(f"{1e3 * o.ttft_p50_s:.0f}" for o in rounds),
                " / ".join(f"{1e3 * o.ttft_p90_s:.0f}" for o in rounds),
                "" if fleet == "tailrace" else " / ".join(f"{o.different} of {o.requests}" for o in rounds),
            )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if answers differ."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache.router",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--router", type=Path, required=True, metavar="DIR", help="folder that contains vllm-router"
    )
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=24, help="per policy and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(arguments)
    if not (options.router / "vllm_router").is_dir():
        parser.error(f"--router: no vllm-router in {options.router}; pip install --target DIR vllm-router")
    console = Console(stderr=True)
    outcomes = asyncio.run(
        measure(options.router, options.users, options.conversations, options.rounds, console)
    )
    figures: dict[str, object] = {"users": options.users, "runs": [asdict(each) for each in outcomes]}
    path = save("cache-router", figures)
    if options.output == "json":
        print_json("cache-router", figures)
    else:
        table_console(120).print(table(outcomes))
    console.print(f"saved to {path}")
    return 1 if any(each.different for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
