"""One request's life: prefilled, reasoning, answering, outgrown its stage, rebalanced; its trace as a tree.

    .venv/bin/python -m examples.life_of_a_request

Starts a cluster of four vLLM workers with pools and length stages, and stops it in the end. The request is
moved four times, each time by a policy's own decision; three of the papers' policies take turns, as `tailrace
set policy` would have them:

    arrow     places it in the prefill pool, and hands it over when prefill is done
    pascal    moves it when its reasoning ends, away from others that reason
    cascade   hands it over when it outgrows its stage, and rebalances the stage, both by bid-ask

Other users' requests are put in place by hand (`tailrace migrate`); this one never is. Exits
1 unless it made these four moves and its answer is the only right one.
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
from tailrace.telemetry.spans import read_traces
from tailrace.telemetry.tree import render_tree
from tailrace.tiny.task import check, task
from tailrace.v1 import admin_pb2, migration_pb2, types_pb2

MODEL = "tiny"
# Tokens: the boundary lies beyond its reasoning and within its answer.
BOUNDARY = 700
REQUEST = task("life", 40, 110)
MOVES = [
    ("prefill done", "arrow"),
    ("reasoning ended", "pascal"),
    ("length boundary", "cascade"),
    ("overloaded", "cascade"),
]


class Neighbour:
    """Another user's request: reasons for thousands of tokens, unless the user leaves."""

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
        # It may end with the cluster, when the story ends early.
        with stream, contextlib.suppress(OpenAIError):
            for chunk in stream:
                self.request_id = chunk.id
                self._started.set()
                if self._gone.is_set():
                    return

    def leave(self) -> None:
        """The user closes the connection."""
        self._gone.set()
        self._thread.join(timeout=60)


class Story:
    """What is done, in order. Waits for what it needs to see, each time for a minute at most."""

    def __init__(self, client: OpenAI, admin: Admin) -> None:
        self._client = client
        self._admin = admin.stub
        self._fleet = Fleet(admin.stub)
        self._pool = ThreadPoolExecutor(1)
        self.chat = Chat()

    def lay_out(self) -> None:
        """worker-0 prefills; short contexts on worker-0 and worker-1, long ones on worker-2 and worker-3."""
        for number in range(4):
            pool = types_pb2.POOL_PREFILL if number == 0 else types_pb2.POOL_DECODE
            request = admin_pb2.SetPoolRequest(instance_id=f"worker-{number}", pool=pool)
            self._admin.SetPool(request, timeout=10)
        stages = [
            types_pb2.Stage(lo=0, hi=BOUNDARY, instance_ids=["worker-0", "worker-1"]),
            types_pb2.Stage(lo=BOUNDARY, hi=131_072, instance_ids=["worker-2", "worker-3"]),
        ]
        self._admin.SetStages(admin_pb2.SetStagesRequest(stages=stages), timeout=10)

    def tell(self) -> Chat:
        """The whole story; what the request gave."""
        self.policy("arrow")
        # Both long ones are ahead of the request by so much that they stay larger than it.
        larger = self.neighbour("aaaa", "worker-2", 900)
        large = self.neighbour("bbbb", "worker-3", 600)
        print("worker-2 and worker-3 are busy with long requests; now the traced request", flush=True)
        answer = self.ask()
        self.moved(1)
        beside = self.neighbour("cccc", "worker-1", 1)
        self.policy("pascal")
        self.moved(2)
        beside.leave()
        self.policy("cascade")
        self.moved(3)
        print(
            "the client of the longest request disconnects, so that the stage is out of balance", flush=True
        )
        (larger if self.where(self.chat.request_id) != self.where(larger.request_id) else large).leave()
        self.moved(4)
        chat = answer.result(timeout=120)
        for other in (larger, large):
            other.leave()
        return chat

    def policy(self, name: str) -> None:
        """As `tailrace set policy`."""
        self._admin.SetPolicy(admin_pb2.SetPolicyRequest(name=name), timeout=10)

        def active() -> bool:
            policies = self._admin.ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=10).policies
            return any(policy.active and policy.name == name for policy in policies)

        wait_until(active, f"policy {name}")
        print(f"policy {name}", flush=True)

    def neighbour(self, word: str, instance: str, tokens: int) -> Neighbour:
        """Another request, put on an instance by the operator, once it has so many tokens."""
        other = Neighbour(self._client, word)

        def there() -> bool:
            found = self._fleet.find(other.request_id)
            if found is None or found.migrating or not found.output_tokens:
                return False  # what is being prefilled, or moved already, cannot be moved
            if found.instance_id == instance:
                return found.output_tokens >= tokens
            with contextlib.suppress(grpc.RpcError):  # the policy was faster
                self._fleet.migrate(found.request_id, instance, "operator")
            return False

        wait_until(there, f"a request on {instance} to have {tokens} tokens")
        return other

    def ask(self) -> Future[Chat]:
        """Send the request; it has an id when this returns."""
        heard = threading.Event()

        def progress(chat: Chat) -> None:
            self.chat = chat
            heard.set()

        answer = self._pool.submit(
            stream_chat,
            self._client,
            MODEL,
            REQUEST.prompt,
            {"temperature": 0.0, "max_tokens": 4000},
            progress,
        )
        heard.wait(timeout=60)
        return answer

    def where(self, request_id: str) -> str:
        """The instance that has a request."""
        found = self._fleet.find(request_id)
        return "" if found is None else found.instance_id

    def moves(self) -> list[migration_pb2.MigrationRecord]:
        """The request's committed migrations, the first first."""
        reply = self._admin.ListMigrations(migration_pb2.ListMigrationsRequest(limit=1000), timeout=10)
        committed = types_pb2.MIGRATION_STATE_COMMITTED
        mine = [m for m in reply.migrations if self.chat.request_id in m.request_id and m.state == committed]
        return sorted(mine, key=lambda m: m.epoch)

    def moved(self, count: int) -> None:
        """Until it has been moved so many times."""
        wait_until(lambda: len(self.moves()) >= count, f"move {count}: {MOVES[count - 1][0]}")
        last = self.moves()[-1]
        way = f"{last.source_instance_id} -> {last.target_instance_id}"
        print(f"  migrated {way}: {last.reason}, by {last.policy}, pause {last.pause_ms:.0f} ms", flush=True)

    def trace(self) -> bytes:
        """Its spans, once the one of its whole life has come."""
        found: list[bytes] = []

        def whole() -> bool:
            request = admin_pb2.GetTraceRequest(id=self.chat.request_id)
            data = self._admin.GetTrace(request, timeout=10).traces_data
            found[:] = [data]
            names = [span.name for each in read_traces(data) for span in each.walk()]
            # Each process sends its spans a few seconds after they end.
            return REQUEST_SPAN in names and names.count("pause") == len(MOVES)

        wait_until(whole, "the trace")
        return found[0]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll; TimeoutError naming `what` when it takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.05)


def main() -> int:
    """0 when it made the four moves and said what it ought to."""
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
                return tell(Story(client, admin))
        finally:
            subprocess.run([*tailrace, "down"], check=True, stdout=subprocess.DEVNULL, timeout=120)


def tell(story: Story) -> int:
    """0 when all is as it ought to be."""
    story.lay_out()
    chat = story.tell()
    right = check(REQUEST, chat.reasoning, chat.answer).right
    moves = [(move.reason, move.policy) for move in story.moves()]
    print_figures(render_tree(story.trace()))
    print(f"answer right: {'yes' if right else 'NO'}; migrations: {len(moves)}")
    return 0 if right and moves == MOVES else 1


if __name__ == "__main__":
    sys.exit(main())
