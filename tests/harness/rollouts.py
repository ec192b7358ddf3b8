"""A rollout under load: clients that send requests continuously, and which model made each answer."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np
import openai
from safetensors.numpy import load_file, save_file

from examples.fleet import Chat, stream_chat
from tailrace.cli.errors import Unreachable
from tailrace.tiny import MODEL_PATH
from tests.harness.chats import client
from tests.harness.fleet import MODEL, Fleet
from tests.harness.processes import tailrace
from tests.waiting import WAIT_S

# Until a command that no scheduler could carry out is tried again.
_PAUSE_S = 0.5


def run_rollout(fleet: Fleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `tailrace rollout ...` and return its result; again as long as no scheduler carries it out."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        addresses = ",".join(
            address
            for name, address in fleet.addresses.items()
            if name.startswith("scheduler") and fleet.processes[name].alive
        )
        command = tailrace("rollout", *arguments, "--admin", addresses)
        result = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
        if result.returncode != Unreachable.exit_code or time.monotonic() > deadline_s:
            return result
        time.sleep(_PAUSE_S)


def fingerprints(fleet: Fleet) -> dict[str, str]:
    """Return the model fingerprint of each instance that the front ends can use."""
    result = run_rollout(fleet, "status", MODEL, "-o", "json")
    assert result.returncode == 0, result.stderr
    (model,) = json.loads(result.stdout)["models"]
    return {name: each["fingerprint"] for each in model["versions"] for name in each["instance_ids"]}


def changed_model(folder: Path, model: Path = MODEL_PATH) -> Path:
    """Make a copy of a model with other weights, and thus other answers, and return its path."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    noise = np.random.default_rng(1)
    for name, weight in weights.items():
        if weight.ndim == 2:
            factors = 1 + 0.2 * noise.standard_normal(weight.shape)
            weights[name] = (weight * factors).astype(weight.dtype)
    save_file(weights, file)
    return folder


class Load:
    """Concurrent clients, each of which sends the prompts in turn until `stop`, without retries."""

    def __init__(self, http: str, prompts: Sequence[str], options: dict[str, object], clients: int) -> None:
        self._client = client(http)
        self._prompts = prompts
        self._options = {"temperature": 0, **options}
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(clients)
        self.answers: list[tuple[str, Chat]] = []
        self.errors: list[str] = []
        self._clients: list[Future[None]] = [self._pool.submit(self._run, n) for n in range(clients)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop all clients, also when the test has failed."""
        self._stopped.set()
        self._pool.shutdown()

    def count(self) -> int:
        """Return the number of answers so far."""
        with self._lock:
            return len(self.answers)

    def stop(self) -> None:
        """Stop the clients and wait for running requests. Raise a client's unexpected exception."""
        self._stopped.set()
        for each in self._clients:
            each.result(timeout=WAIT_S)

    def _run(self, number: int) -> None:
        for prompt in itertools.islice(itertools.cycle(self._prompts), number, None):
            if self._stopped.is_set():
                return
            try:
                chat = stream_chat(self._client, MODEL, prompt, self._options, lambda chat: None)
            except openai.OpenAIError as error:
                with self._lock:
                    self.errors.append(str(error))
            else:
                with self._lock:
                    self.answers.append((prompt, chat))


def count_by_model(load: Load, alone: dict[str, dict[str, Chat]]) -> Counter[str]:
    """Count the answers that equal those of each model alone; `mixed`: the others."""
    counts: Counter[str] = Counter()
    for prompt, chat in load.answers:
        matching = [name for name, answers in alone.items() if chat.same_text_and_usage(answers[prompt])]
        counts[matching[0] if len(matching) == 1 else "mixed"] += 1
    return counts
