"""Two data-parallel ranks of a mixture of experts, and a worker with the same model on its own.

The model is random and small, its streams are greedy and run one at a time on a rank, so each must be equal
on every instance. See `cpu_experts` for what of vLLM is replaced on a CPU.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tailrace.tiny import MODEL_PATH
from tailrace.v1 import types_pb2
from tests.e2e.cpu_experts import write_plugin
from tests.harness.fleet import MODEL, Fleet
from tests.harness.processes import wait_until
from tests.harness.tries import RequestEnded, before_it_ends
from tests.ports import free_port
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 400
RANKS = ("w0", "w1")
ALONE = "w2"
TOKENS = 800
PROMPTS = [list(range(number, number + 40)) for number in (65, 80)]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_experts(folder: Path) -> Path:
    """Write a random mixture of four experts with the tiny model's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(20261125)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=4096,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(MODEL_PATH / name, folder / name)
    return folder


@dataclass
class Tokens:
    """A stream so far. `request_id`: the API server's, then the fleet's, which contains it."""

    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)


@dataclass
class Deployment:
    """The fleet, and clients of it."""

    fleet: Fleet
    clients: ThreadPoolExecutor

    def start(self, prompt: Sequence[int], instance: str) -> tuple[Tokens, Future[list[int]]]:
        """Start a stream and bring it to this instance; another one if it ends before."""
        return before_it_ends(lambda: self.try_to_start(prompt, instance))

    def try_to_start(self, prompt: Sequence[int], instance: str) -> tuple[Tokens, Future[list[int]]]:
        """Do that once. Raise RequestEnded if the stream ends before it is there."""
        tokens = Tokens()
        ended = self.clients.submit(self._stream, prompt, tokens)
        wait_until(lambda: tokens.begun.is_set() or ended.done(), "the stream to begin")
        if ended.done():
            # It may have failed.
            ended.result()
        found = self.fleet.wait_request(tokens.request_id, ended=ended.done)
        tokens.request_id = found.request_id
        if found.instance_id != instance:
            self.move(tokens, ended, instance)
        return tokens, ended

    def move(self, tokens: Tokens, ended: Future[list[int]], instance: str) -> None:
        """Migrate a stream live, and wait until the scheduler sees it there. Raise RequestEnded."""
        record = self.fleet.move(tokens.request_id, instance)
        assert record.way == types_pb2.WAY_LIVE, record.way_reason

        def is_there() -> bool:
            if ended.done():
                raise RequestEnded(f"the stream was not seen on {instance}")
            found = self.fleet.find_request(tokens.request_id)
            return found is not None and found.instance_id == instance

        wait_until(is_there, f"the request to be on {instance}")

    def run(self, prompt: Sequence[int], instance: str) -> list[int]:
        """Return all tokens of a stream on this instance."""
        return self.start(prompt, instance)[1].result(timeout=WAIT_S)

    def _stream(self, prompt: Sequence[int], tokens: Tokens) -> list[int]:
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        url = f"{self.fleet.http}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                tokens.request_id = tokens.request_id or chunk["id"]
                tokens.token_ids += chunk["choices"][0]["token_ids"] or []
                tokens.begun.set()
        return tokens.token_ids


@pytest.fixture(scope="module", params=["experts split", "experts sharded"])
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    root = tmp_path_factory.mktemp("data-parallel")
    model = write_experts(root / "model")
    common = ["--kv-blocks", "256", "--dtype", "float32", "--max-model-len", "1024"]
    shared = ["--enable-expert-parallel"] if request.param == "experts split" else []
    port = free_port()
    fleet = Fleet(root, "vllm")
    fleet.plugins = write_plugin(root / "plugin")
    try:
        fleet.start_control()
        fleet.start_worker(ALONE, common, wait=False, model=str(model))
        for rank, name in enumerate(RANKS):
            options = [*shared, f"-dp={len(RANKS)}", f"--data-parallel-rank={rank}"]
            options += ["--data-parallel-address=127.0.0.1", f"--data-parallel-rpc-port={port}"]
            fleet.start_worker(name, [*common, *options], wait=False, model=str(model))
        for name in (*RANKS, ALONE):
            fleet.wait_healthy(name, START_S)
        fleet.start_frontend(model=str(model))
        fleet.wait_instances([*RANKS, ALONE])
        with ThreadPoolExecutor(4) as clients:
            yield Deployment(fleet, clients)
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def expected(session: Deployment) -> list[list[int]]:
    """The streams of the worker that has the model on its own."""
    return [session.run(prompt, ALONE) for prompt in PROMPTS]


def test_each_rank_streams_what_one_worker_does(session: Deployment, expected: list[list[int]]) -> None:
    """One rank at a time, while the other runs dummy batches, and both at once."""
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert [session.run(prompt, name) for name in RANKS] == [tokens] * 2
    both = [session.start(prompt, name) for prompt, name in zip(PROMPTS, RANKS, strict=True)]
    assert [ended.result(timeout=WAIT_S) for _, ended in both] == expected


@pytest.mark.parametrize("name", RANKS)
def test_request_starts_an_idle_deployment(session: Deployment, expected: list[list[int]], name: str) -> None:
    session.fleet.wait_idle()
    assert session.run(PROMPTS[0], name) == expected[0]


def test_request_moves_live_between_ranks(session: Deployment, expected: list[list[int]]) -> None:
    def moved() -> Future[list[int]]:
        tokens, ended = session.try_to_start(PROMPTS[0], RANKS[0])
        for name in (RANKS[1], RANKS[0], ALONE, RANKS[1]):
            session.move(tokens, ended, name)
        return ended

    ended = before_it_ends(moved)
    assert ended.result(timeout=WAIT_S) == expected[0]


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_rank_ends_the_deployment_and_no_stream(
    session: Deployment, expected: list[list[int]], killed: int
) -> None:
    fleet, survivor = session.fleet, RANKS[1 - killed]
    streams = [session.start(prompt, name) for prompt, name in zip(PROMPTS, RANKS, strict=True)]
    fleet.processes[RANKS[killed]].kill()
    assert [ended.result(timeout=WAIT_S) for _, ended in streams] == expected
    wait_until(lambda: not fleet.processes[survivor].alive, f"{survivor} to end")
    said = f"rank {killed} of 2 of the data-parallel deployment has died"
    assert said in fleet.processes[survivor].text()
    # A supervisor restarts both.
    fleet.repair(START_S)
    fleet.wait_instances([*RANKS, ALONE])
    assert session.run(PROMPTS[0], RANKS[killed]) == expected[0]


def test_killed_rank_ends_an_idle_deployment(session: Deployment) -> None:
    fleet = session.fleet
    fleet.wait_idle()
    fleet.processes[RANKS[1]].kill()
    wait_until(lambda: not fleet.processes[RANKS[0]].alive, "rank 0 to end")
    fleet.repair(START_S)
    fleet.wait_instances([*RANKS, ALONE])
