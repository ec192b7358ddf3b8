"""Stream fifty chats at once, with seeds, penalties and logprobs, while they are migrated at random.

    make up
    .venv/bin/python -m examples.fifty_streams

Each request runs twice: once undisturbed (all fifty together), once while random requests are migrated to
random instances as fast as the migration service admits. Exits with 1 unless all pairs of answers are equal.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from openai import OpenAI

from examples.fleet import Chat, Fleet, exit_on_connection_error, local_url, stream_chat
from tailrace.cli.admin import connect
from tailrace.tiny.task import make_task
from tailrace.v1 import types_pb2


def variants(count: int) -> list[tuple[str, dict[str, object]]]:
    """Return prompt and sampling options of each stream: greedy, seeded, penalized, with and without
    logprobs."""
    streams: list[tuple[str, dict[str, object]]] = []
    for seed in range(count):
        options: dict[str, object] = {"temperature": 0.0, "max_tokens": 700}
        kind = seed % 5
        if kind == 1:
            options |= {"temperature": 1.0, "seed": seed, "max_tokens": 400}
        elif kind == 2:
            options |= {"temperature": 0.8, "seed": seed, "top_p": 0.9, "logprobs": True, "top_logprobs": 2}
        elif kind == 3:
            options |= {"frequency_penalty": 0.2, "presence_penalty": 0.1, "max_tokens": 300}
        elif kind == 4:
            options |= {"logprobs": True}
        streams.append((make_task(seed).prompt, options))
    return streams


def run_all(client: OpenAI, model: str, work: list[tuple[str, dict[str, object]]]) -> list[Chat]:
    """Run all streams at once; return the results in the order of `work`."""
    with ThreadPoolExecutor(max_workers=len(work)) as pool:
        futures = [pool.submit(stream_chat, client, model, prompt, options) for prompt, options in work]
        return [future.result(timeout=600) for future in futures]


def refusal(error: grpc.RpcError, request_id: str, target: str) -> str:
    """Return why a migration was refused, without the names of the request and its target."""
    reason = error.details() or error.code().name.lower().replace("_", " ")
    reason = reason.replace(f"request {request_id}", "the request").replace(repr(request_id), "")
    return reason.replace(target, "the target").removeprefix("request_id: ").strip()


class Mover:
    """Migrate random requests to random instances until the block ends."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self.outcomes: collections.Counter[str] = collections.Counter()
        # By the reason in words.
        self.refusals: collections.Counter[str] = collections.Counter()
        self.pauses_ms: list[float] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(4)]

    def __enter__(self) -> Mover:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def _run(self) -> None:
        instances = self._fleet.instances()
        while not self._stop.wait(0.02):
            running = self._fleet.requests()
            if not running:
                continue
            request = self._random.choice(running)
            target = self._random.choice([i for i in instances if i != request.instance_id])
            try:
                record = self._fleet.migrate(request.request_id, target, reason="at random")
            except grpc.RpcError as refused:
                self.refusals[refusal(refused, request.request_id, target)] += 1
                continue
            self.outcomes[types_pb2.MigrationState.Name(record.state).rpartition("_")[2].lower()] += 1
            if record.state == types_pb2.MIGRATION_STATE_COMMITTED:
                self.pauses_ms.append(record.pause_ms)


def main() -> int:
    """Run both rounds; return 0 if every stream is equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", default=local_url(), help="OpenAI API (default: the local cluster's)")
    parser.add_argument("--admin", default=None, help="admin API, HOST:PORT (default: the local cluster's)")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of migrations")
    options = parser.parse_args()

    with exit_on_connection_error(options.url), connect(options.admin) as admin:
        return run(options, Fleet(admin.stub))


def run(options: argparse.Namespace, fleet: Fleet) -> int:
    """Run both rounds; return 0 if every stream is equal and some were migrated."""
    client = OpenAI(base_url=options.url, api_key="none", timeout=600, max_retries=0)
    model = client.models.list().data[0].id
    work = variants(options.streams)

    print(f"{len(work)} streams, undisturbed ...", flush=True)
    undisturbed = run_all(client, model, work)
    print(f"  {sum(c.completion_tokens for c in undisturbed):,} tokens")
    print("the same, while this script migrates random ones to random instances ...", flush=True)
    with Mover(fleet, options.seed) as mover:
        moved = run_all(client, model, work)

    print(f"  migrations: {', '.join(f'{n} {what}' for what, n in sorted(mover.outcomes.items())) or 'none'}")
    for reason, times in mover.refusals.most_common():
        print(f"  {times} refused: {reason}")
    if mover.pauses_ms:
        ordered = sorted(mover.pauses_ms)
        print(f"  pause: median {ordered[len(ordered) // 2]:.1f} ms, worst {ordered[-1]:.1f} ms")
    equal = 0
    for (prompt, sampling), before, after in zip(work, undisturbed, moved, strict=True):
        if before.same_text_and_usage(after):
            equal += 1
        else:
            print(f"  DIFFERENT: {prompt!r} {sampling}")
            print(f"    {before.completion_tokens} / {after.completion_tokens} tokens")
    print(f"{equal} of {len(work)} equal")
    return 0 if equal == len(work) and mover.outcomes["committed"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
