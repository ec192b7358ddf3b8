"""Follow one request: prefill, reasoning, answering, outgrowing its stage, rebalancing; print its trace as a
tree.

    .venv/bin/python -m examples.life_of_a_request

Starts a cluster of four vLLM workers with pools and length stages, and stops it at the end. The request is
migrated four times, each time by a policy's own decision. Three of the papers' policies are activated in
turn, as by `tailrace set policy`:

    arrow     places it in the prefill pool, and hands it over when its prefill is done
    pascal    migrates it when its reasoning ends, away from other requests that reason
    cascade   hands it over when it outgrows its stage, and rebalances the stage, both by bid-ask

Other users' requests are placed by hand (`tailrace migrate`); this one never is. Exits with 1 unless it was
migrated these four times and its answer is correct.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
from openai import OpenAI, OpenAIError

from examples.fleet import Chat, Fleet, stream_chat
from tailrace.cli.admin import Admin, connect
from tailrace.cli.output import print_figures
from tailrace.local.ports import free_ports
from tailrace.telemetry.attributes import REQUEST_SPAN
from tailrace.telemetry.tree import read_traces, render_tree
from tailrace.tiny.task import check, task
from tailrace.v1 import admin_pb2, migration_pb2, types_pb2

MODEL = "tiny"
# In tokens: longer than the request's prompt and reasoning, shorter than its whole context.
BOUNDARY = 700
# Its answer goes on for seconds after the boundary, in which the stage is rebalanced.
REQUEST = task("life", 40, 160)
MOVES = [
    ("prefill done", "arrow"),
    ("reasoning ended", "pascal"),
    ("length boundary", "cascade"),
    ("overloaded", "cascade"),
]


class Neighbour:
    """Another user's request, which reasons for thousands of tokens unless the user leaves."""

    def __init__(self, client: OpenAI, word: str) -> None:
        self._gone = threading.Event()
        self.request_id = ""
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(client, task(word, 299, 299).prompt))
        self._thread.start()
        self._started.wait(timeout=60)

    def _read(self, client: OpenAI, prompt: str) -> None:
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": prompt}], stream=True, temperature=0
        )
        # The stream breaks if the cluster stops before it ends.
        with stream, contextlib.suppress(OpenAIError):
            for chunk in stream:
                self.request_id = chunk.id
                self._started.set()
                if self._gone.is_set():
                    return

    def leave(self) -> None:
        """Close the user's connection."""
        self._gone.set()
        self._thread.join(timeout=60)


class Story:
    """The events in order. Each waits for its precondition, for a minute at most."""

    def __init__(self, client: OpenAI, admin: Admin) -> None:
        self._client = client
        self._admin = admin.stub
        self._fleet = Fleet(admin.stub)
        self._pool = ThreadPoolExecutor(1)
        self.chat = Chat()

    def lay_out(self) -> None:
        """Set pools and stages: worker-0 prefills; short contexts on worker-0 and -1, long ones on
        worker-2 and -3."""
        for number in range(4):
            pool = types_pb2.POOL_PREFILL if number == 0 else types_pb2.POOL_DECODE
            request = admin_pb2.SetPoolRequest(instance_id=f"worker-{number}", pool=pool)
            self._admin.SetPool(request, timeout=10)
        stages = [
            types_pb2.Stage(lo=0, hi=BOUNDARY, instance_ids=["worker-0", "worker-1"]),
            types_pb2.Stage(lo=BOUNDARY, hi=131_072, instance_ids=["worker-2", "worker-3"]),
        ]
        self._admin.SetStages(admin_pb2.SetStagesRequest(stages=stages), timeout=10)

    def run(self) -> Chat:
        """Run the whole story; return the traced request's chat."""
        self.set_policy("arrow")
        # Both are so far ahead of the traced request that they stay longer than it.
        larger = self.add_neighbour("aaaa", "worker-2", 900)
        large = self.add_neighbour("bbbb", "worker-3", 600)
        print("worker-2 and worker-3 are busy with long requests; now the traced request", flush=True)
        answer = self.start_request()
        self.wait_for_migrations(1)
        beside = self.add_neighbour("cccc", "worker-1", 1)
        self.set_policy("pascal")
        self.wait_for_migrations(2)
        beside.leave()
        self.set_policy("cascade")
        self.wait_for_migrations(3)
        print(
            "the client of the longest request disconnects, so that the stage is out of balance", flush=True
        )
        (
            larger if self.instance_of(self.chat.request_id) != self.instance_of(larger.request_id) else large
        ).leave()
        self.wait_for_migrations(4)
        chat = answer.result(timeout=120)
        for other in (larger, large):
            other.leave()
        return chat

    def set_policy(self, name: str) -> None:
        """Activate a policy, like `tailrace set policy`."""
        self._admin.SetPolicy(admin_pb2.SetPolicyRequest(name=name), timeout=10)

        def active() -> bool:
            policies = self._admin.ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=10).policies
            return any(policy.active and policy.name == name for policy in policies)

        wait_until(active, f"policy {name}")
        print(f"policy {name}", flush=True)

    def add_neighbour(self, word: str, instance: str, tokens: int) -> Neighbour:
        """Start another request on an instance, as its operator; return it once it has this many tokens."""
        other = Neighbour(self._client, word)

        def has_tokens() -> bool:
            info = self._fleet.find(other.request_id)
            if info is None or info.migrating or not info.output_tokens:
                return False  # still prefilling, or being migrated already
            if info.instance_id == instance:
                return info.output_tokens >= tokens
            with contextlib.suppress(grpc.RpcError):  # the policy was faster
                self._fleet.migrate(info.request_id, instance, "operator")
            return False

        wait_until(has_tokens, f"a request on {instance} to have {tokens} tokens")
        return other

    def start_request(self) -> Future[Chat]:
        """Send the traced request; return once it has an id."""
        first_chunk = threading.Event()

        def progress(chat: Chat) -> None:
            self.chat = chat
            first_chunk.set()

        answer = self._pool.submit(
            stream_chat,
            self._client,
            MODEL,
            REQUEST.prompt,
            {"temperature": 0.0, "max_tokens": 4000},
            progress,
        )
        first_chunk.wait(timeout=60)
        return answer

    def instance_of(self, request_id: str) -> str:
        """Return the instance that has a request; empty if there is none."""
        request = self._fleet.find(request_id)
        return "" if request is None else request.instance_id

    def migrations(self) -> list[migration_pb2.MigrationRecord]:
        """Return the traced request's committed migrations, in order."""
        reply = self._admin.ListMigrations(migration_pb2.ListMigrationsRequest(limit=1000), timeout=10)
        committed = types_pb2.MIGRATION_STATE_COMMITTED
        migrations = [
            m for m in reply.migrations if self.chat.request_id in m.request_id and m.state == committed
        ]
        return sorted(migrations, key=lambda m: m.epoch)

    def wait_for_migrations(self, count: int) -> None:
        """Wait until the request has been migrated `count` times, and print the last migration."""
        wait_until(lambda: len(self.migrations()) >= count, f"move {count}: {MOVES[count - 1][0]}")
        last = self.migrations()[-1]
        route = f"{last.source_instance_id} -> {last.target_instance_id}"
        print(
            f"  migrated {route}: {last.reason}, by {last.policy}, pause {last.pause_ms:.0f} ms", flush=True
        )

    def trace(self) -> bytes:
        """Return the request's spans, once its root span and all pauses have arrived."""
        spans: list[bytes] = []

        def complete() -> bool:
            request = admin_pb2.GetTraceRequest(id=self.chat.request_id)
            data = self._admin.GetTrace(request, timeout=10).traces_data
            spans[:] = [data]
            names = [span.name for trace in read_traces(data) for span in trace.walk()]
            # Each process sends its spans a few seconds after they end.
            return REQUEST_SPAN in names and names.count("pause") == len(MOVES)

        wait_until(complete, "the trace")
        return spans[0]


def wait_until(condition: Callable[[], bool], description: str, timeout_s: float = 60.0) -> None:
    """Poll until the condition holds. Raise TimeoutError, which names `description`, after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {description}")
        time.sleep(0.05)


def main() -> int:
    """Return 0 if the request was migrated four times and its answer is correct."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="tailrace-life-") as folder:
        os.environ["TAILRACE_RUN_DIR"] = folder
        tailrace = [sys.executable, "-m", "tailrace"]
        command = [*tailrace, "up", "--workers", "4", "--port", str(port), "--policy", "arrow"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
        try:
            client = OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120, max_retries=0
            )
            with connect(None) as admin:
                return report(Story(client, admin))
        finally:
            subprocess.run([*tailrace, "down"], check=True, stdout=subprocess.DEVNULL, timeout=120)


def report(story: Story) -> int:
    """Run the story and print the trace; return 0 if everything is as expected."""
    story.lay_out()
    chat = story.run()
    right = check(REQUEST, chat.reasoning, chat.answer).right
    moves = [(move.reason, move.policy) for move in story.migrations()]
    print_figures(render_tree(story.trace()))
    print(f"answer right: {'yes' if right else 'NO'}; migrations: {len(moves)}")
    return 0 if right and moves == MOVES else 1


if __name__ == "__main__":
    sys.exit(main())
