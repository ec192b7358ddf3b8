"""A fleet of real vLLM engines under migrations, failures and invalid input, as its users see it.

Every answer is compared with the one that the tiny model must give, token by token.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from urllib.parse import urlsplit

import grpc
import httpx
import openai
import pytest

from examples.fleet import Chat
from tailrace.tiny.task import Task, task
from tailrace.v1 import admin_pb2, migration_pb2, types_pb2
from tests.e2e.conftest import VLLM_MAX_MESSAGE_BYTES, VLLM_WORKERS
from tests.harness.chats import Chats, assert_expected, client
from tests.harness.fleet import MODEL, Fleet, request_had_ended
from tests.harness.processes import wait_until
from tests.harness.tries import TRIES, before_it_ends, once_available
from tests.waiting import WAIT_S

pytestmark = pytest.mark.vllm

COMMITTED = types_pb2.MIGRATION_STATE_COMMITTED

# Some 560 tokens: long enough to be moved twice and to be running at every failure.
LONG = task("wxyz", 45, 15)
# A description and a condition to wait for.
Moment = tuple[str, Callable[[Chat], bool]]
# Long enough for actions in mid-stream, also when the test gets little CPU time.
LONGER = task("wxyz", 80, 40)
# Never read to its end.
ENDLESS = task("wxyz", 299, 299)
TEN = [task(f"ab{chr(97 + n)}d", 36 + n, 8 + n) for n in range(10)]
# Shows that the fleet still serves.
SHORT = task("kite", 12, 4)


class Progress:
    """The progress of a stream, for which a test can wait."""

    def __init__(self) -> None:
        self.chat = Chat()

    def __call__(self, chat: Chat) -> None:
        self.chat = chat

    def wait(self, condition: Callable[[Chat], bool], what: str) -> Chat:
        """Wait until the condition holds for the chat so far, and return it."""
        wait_until(lambda: condition(self.chat), what)
        return self.chat


def longer_than(length: int) -> Callable[[Chat], bool]:
    """Return a condition: the chat has more characters than `length`."""
    return lambda chat: len(chat.reasoning) + len(chat.answer) > length


def others(instance_id: str) -> list[str]:
    """Return the names of the other workers."""
    return [name for name in VLLM_WORKERS if name != instance_id]


def test_reasoning_and_answer_are_separated(vllm_chats: Chats) -> None:
    assert_expected(vllm_chats.run(SHORT.prompt), SHORT)


def test_answer_is_unchanged_by_three_migrations(vllm_fleet: Fleet, vllm_chats: Chats) -> None:
    moments: list[Moment] = [
        ("some thought", lambda chat: len(chat.reasoning) > 200),
        ("half the thought", lambda chat: len(chat.reasoning) > len(LONGER.thought) // 2),
        ("some answer", lambda chat: len(chat.answer) > 20),
    ]
    records = move_at_each(
        vllm_fleet, vllm_chats, LONGER.prompt, {}, moments, lambda chat: assert_expected(chat, LONGER)
    )
    assert all(record.bytes > 0 and record.rounds for record in records)
    assert {record.phase for record in records} == {types_pb2.PHASE_REASONING, types_pb2.PHASE_ANSWERING}


SCHEMA = {
    "type": "object",
    "properties": {
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 40}
    },
    "required": ["numbers"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"temperature": 1.0, "seed": 7, "max_tokens": 450}, marks=pytest.mark.slow),
        {"temperature": 0.9, "seed": 3, "top_p": 0.8, "logprobs": True, "top_logprobs": 3, "max_tokens": 300},
        pytest.param(
            {"frequency_penalty": 0.6, "presence_penalty": 0.3, "max_tokens": 450}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"extra_body": {"repetition_penalty": 1.2, "min_tokens": 400}, "max_tokens": 450},
            marks=pytest.mark.slow,
        ),
        {"temperature": 1.0, "seed": 11, "stop": ["15 w"]},
        {
            "temperature": 1.0,
            "seed": 5,
            "max_tokens": 400,
            "response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA}},
        },
    ],
    ids=["seeded", "seeded-logprobs", "penalties", "repetition-min-tokens", "stop-string", "json-schema"],
)
def test_sampling_state_is_migrated(vllm_fleet: Fleet, vllm_chats: Chats, options: dict[str, object]) -> None:
    alone = vllm_chats.run(LONG.prompt, **options)
    moments: list[Moment] = [(f"{length} characters", longer_than(length)) for length in (30, 100)]

    def check(chat: Chat) -> None:
        assert chat.same_text_and_usage(alone)

    move_at_each(vllm_fleet, vllm_chats, LONG.prompt, options, moments, check)


def move_at_each(
    fleet: Fleet,
    chats: Chats,
    prompt: str,
    options: Mapping[str, object],
    moments: Sequence[Moment],
    check: Callable[[Chat], None],
) -> list[migration_pb2.MigrationRecord]:
    """Run a request and move it at each of these moments; retry if it ended before. `check` every answer."""
    for _ in range(TRIES):
        records, chat = move_while_running(fleet, chats, prompt, options, moments)
        check(chat)
        if len(records) == len(moments):
            return records
    pytest.fail(f"it ended before it was moved {len(moments)} times, {TRIES} times")


def move_while_running(
    fleet: Fleet, chats: Chats, prompt: str, options: Mapping[str, object], moments: Sequence[Moment]
) -> tuple[list[migration_pb2.MigrationRecord], Chat]:
    """Run a request and move it at each moment as long as it runs; return the moves and the answer."""
    progress = Progress()
    stream = chats.start(prompt, progress, **options)
    records: list[migration_pb2.MigrationRecord] = []
    for what, far_enough in moments:
        part = progress.wait(far_enough, what).request_id

        def movable(part: str = part) -> bool:
            found = fleet.find_request(part)
            return stream.done() or (found is not None and found.phase != types_pb2.PHASE_PREFILL)

        # The scheduler may learn of a phase after the client has received tokens of it.
        wait_until(movable, "the request to be listed, and decoded")
        placed = fleet.find_request(part)
        if placed is None:
            break
        try:
            record = fleet.migrate(placed.request_id, others(placed.instance_id)[0])
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND, error
            break
        if record.state != COMMITTED:
            assert request_had_ended(record), record.error
            break
        records.append(record)
    return records, stream.result(timeout=WAIT_S)


def start_all(chats: Chats, tasks: Sequence[Task]) -> Callable[[], list[Chat]]:
    """Start these streams and wait until each client has received some reasoning."""
    progresses = [Progress() for _ in tasks]
    futures = [chats.start(t.prompt, p) for t, p in zip(tasks, progresses, strict=True)]
    for progress in progresses:
        progress.wait(lambda chat: len(chat.reasoning) > 50, "every stream to begin")
    return lambda: [future.result(timeout=WAIT_S) for future in futures]


def busiest(fleet: Fleet) -> str:
    """Return the worker with the most requests."""
    instances = fleet.instances()
    return max(VLLM_WORKERS, key=lambda name: instances[name].running)


def test_too_many_prompt_logprobs_end_only_their_request(vllm_fleet: Fleet, vllm_chats: Chats) -> None:
    """A reply beyond the message limit ends its request with a clear error, and nothing else."""
    for _ in range(TRIES):
        recoveries, silences = count_recoveries(vllm_fleet), vllm_fleet.silences()
        exceed_message_limit(vllm_fleet, vllm_chats)
        # On a machine that is too busy a worker may be silent for so long that its requests are recomputed.
        if vllm_fleet.silences() == silences:
            break
    assert count_recoveries(vllm_fleet) == recoveries


def count_recoveries(fleet: Fleet) -> float:
    """Return how often the front end had a request recomputed."""
    return fleet.metric("frontend", "tailrace_frontend_recoveries_total")


def exceed_message_limit(fleet: Fleet, chats: Chats) -> None:
    """Send requests whose replies are beyond the limit and within it, beside other streams."""
    # One a worker, if they are spread evenly.
    few = TEN[:3]
    results = start_all(chats, few)
    body = {"model": MODEL, "max_tokens": 1, "prompt_logprobs": -1}
    url = f"{fleet.http}/v1/completions"
    for prompt in ("x" * 3000, "y" * 3000):
        refused = httpx.post(url, json={**body, "prompt": prompt}, timeout=WAIT_S)
        assert refused.status_code == 400, refused.text[:500]
        assert f"what can be sent ({VLLM_MAX_MESSAGE_BYTES} bytes" in refused.json()["error"]["message"]
    # A reply within the limit is complete.
    answered = httpx.post(url, json={**body, "prompt": "z" * 100}, timeout=WAIT_S)
    assert answered.status_code == 200, answered.text[:500]
    assert len(answered.json()["choices"][0]["prompt_logprobs"]) == 100
    for chat, expected in zip(results(), few, strict=True):
        assert_expected(chat, expected)
    assert_expected(chats.run(SHORT.prompt), SHORT)


def test_ten_streams_survive_a_killed_worker(vllm_fleet: Fleet, vllm_chats: Chats) -> None:
    results = start_all(vllm_chats, TEN)
    vllm_fleet.processes[busiest(vllm_fleet)].kill()
    for chat, expected in zip(results(), TEN, strict=True):
        assert_expected(chat, expected)


def test_ten_streams_survive_a_hung_worker(vllm_fleet: Fleet, vllm_chats: Chats) -> None:
    results = start_all(vllm_chats, TEN)
    victim = vllm_fleet.processes[busiest(vllm_fleet)]
    victim.freeze()
    chats = results()
    # It resumes with requests that it no longer owns, and must not disturb others.
    victim.thaw()
    for chat, expected in zip(chats, TEN, strict=True):
        assert_expected(chat, expected)
    vllm_fleet.wait_idle()


def held_migration(fleet: Fleet, chats: Chats, step: str) -> tuple[str, str, Callable[[], Chat]]:
    """Start a stream and hold its migration at a step.

    Return the source, the target and a function that waits for the stream's end.
    """

    def held() -> tuple[str, str, Callable[[], Chat]]:
        # Long enough to be on its instance when the migration has been ordered.
        stream, chat = chats.begin(LONGER.prompt, lambda chat: len(chat.reasoning) > 100)
        placed = fleet.wait_request(chat.request_id, ended=stream.done)
        target = others(placed.instance_id)[0]
        fleet.hold_migration(placed.request_id, target, step, ended=stream.done)
        return placed.instance_id, target, lambda: stream.result(timeout=WAIT_S)

    return before_it_ends(held)


@pytest.mark.parametrize(
    ("step", "victim"),
    [
        # All steps and victims, with simulated engines: test_kill_matrix.py. A real engine that is killed is
        # in test_ten_streams_survive_a_killed_worker.
        pytest.param("import:open", "target", marks=pytest.mark.slow),
        pytest.param("import:pre_copy", "source", marks=pytest.mark.slow),
        ("import:paused", "migration"),
        pytest.param("import:adopt", "scheduler-0", marks=pytest.mark.slow),
    ],
)
def test_stream_survives_a_kill_during_migration(
    vllm_fleet: Fleet, vllm_chats: Chats, step: str, victim: str
) -> None:
    source, target, result = held_migration(vllm_fleet, vllm_chats, step)
    name = {"source": source, "target": target}.get(victim, victim)
    vllm_fleet.processes[name].kill()
    vllm_fleet.disarm()
    assert_expected(result(), LONGER)


@pytest.mark.parametrize("seconds", [6, pytest.param(30, marks=pytest.mark.slow)])
def test_requests_are_served_without_etcd(vllm_fleet: Fleet, vllm_chats: Chats, seconds: int) -> None:
    before = vllm_fleet.instances()
    progress = Progress()
    running = vllm_chats.start(LONG.prompt, progress)
    progress.wait(lambda chat: len(chat.reasoning) > 50, "a stream to begin")
    vllm_fleet.processes["etcd"].kill()
    killed_s = time.monotonic()
    assert_expected(running.result(timeout=WAIT_S), LONG)
    answered = tries = 0
    # A busy machine may have no time for some requests; it must have for one.
    while tries < 3 or time.monotonic() < killed_s + (seconds if answered else WAIT_S):
        tries += 1
        try:
            assert_expected(vllm_chats.run(SHORT.prompt), SHORT)
            answered += 1
        except openai.InternalServerError as refused:
            assert refused.status_code == 503 and refused.response.headers.get("retry-after")
        time.sleep(1)
    assert answered > 0
    vllm_fleet.repair()
    vllm_fleet.wait_instances(VLLM_WORKERS)
    after = vllm_fleet.instances()
    assert {i: x.incarnation for i, x in after.items()} == {i: x.incarnation for i, x in before.items()}
    assert_expected(vllm_chats.run(SHORT.prompt), SHORT)


def test_corrupted_block_aborts_and_is_counted(vllm_fleet: Fleet, vllm_chats: Chats) -> None:
    def failures() -> float:
        return sum(
            vllm_fleet.metric(name, "tailrace_worker_kv_checksum_failures_total") for name in VLLM_WORKERS
        )

    def corrupted() -> tuple[Future[Chat], str, migration_pb2.MigrationRecord]:
        stream, chat = vllm_chats.begin(LONGER.prompt, lambda chat: len(chat.reasoning) > 300)
        placed = vllm_fleet.wait_request(chat.request_id, ended=stream.done)
        vllm_fleet.arm({"corrupt": "kv"})
        record = vllm_fleet.migrate_running(placed.request_id, others(placed.instance_id)[0])
        return stream, chat.request_id, record

    before = failures()
    stream, request_id, record = before_it_ends(corrupted)
    assert record.state == types_pb2.MIGRATION_STATE_ABORTED
    assert "checksum" in record.error
    vllm_fleet.disarm()
    assert_expected(stream.result(timeout=WAIT_S), LONGER)
    assert failures() == before + 1
    # After the stream's end the scheduler lists it no more.
    assert not vllm_fleet.wait_unlisted(request_id)


def test_disconnected_client_frees_its_kv(vllm_fleet: Fleet) -> None:
    def generated() -> float:
        return sum(vllm_fleet.metric(name, "tailrace_worker_generated_tokens_total") for name in VLLM_WORKERS)

    def read_and_disconnect() -> float:
        """Return how many tokens were generated for a client that disconnected after the first ones."""
        before = generated()
        with client(vllm_fleet.http).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": ENDLESS.prompt}], stream=True
        ) as stream:
            for number, _ in enumerate(stream):
                if number == 50:
                    break
        vllm_fleet.wait_idle()
        return generated() - before

    for _ in range(TRIES):
        # It was ended early because its client had disconnected; unless that did not run for many seconds.
        if (made := read_and_disconnect()) < len(ENDLESS.thought):
            break
    assert 50 <= made < len(ENDLESS.thought)


def test_slow_reader_does_not_delay_others(vllm_fleet: Fleet, vllm_chats: Chats) -> None:
    host = urlsplit(vllm_fleet.http)
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": LONG.prompt}], "stream": True}
    ).encode()
    with socket.create_connection((str(host.hostname), int(host.port or 80)), timeout=WAIT_S) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        slow.recv(16)
        # It reads nothing more; its engine runs to the end, and other requests are served meanwhile.
        expected = task("fast", 30, 5)
        assert_expected(vllm_chats.run(expected.prompt), expected)
        vllm_fleet.wait_idle()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("chat/completions", b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', 404),
        ("completions", json.dumps({"model": MODEL, "prompt": "x" * 20_000}).encode(), 400),
        ("chat/completions", b'{"model": "tiny", "messages": "not a list"}', 400),
        ("completions", b'{"model": "tiny", "prompt": "x", "max_tokens": -5}', 400),
        ("chat/completions", b'{"model": "tiny", "messages": [', 400),
    ],
    ids=["unknown-model", "prompt-too-long", "wrong-type", "negative-max-tokens", "broken-json"],
)
def test_invalid_input_gets_an_openai_error(vllm_fleet: Fleet, path: str, body: bytes, status: int) -> None:
    steps = sum(vllm_fleet.metric(name, "tailrace_worker_steps_total") for name in VLLM_WORKERS)
    reply = httpx.post(
        f"{vllm_fleet.http}/v1/{path}",
        content=body,
        headers={"content-type": "application/json"},
        timeout=WAIT_S,
    )
    assert reply.status_code == status, reply.text
    assert {"message", "type", "code"} <= set(reply.json()["error"])
    # No worker ran a step for it.
    assert steps == sum(vllm_fleet.metric(name, "tailrace_worker_steps_total") for name in VLLM_WORKERS)


def test_static_pools_prefill_here_and_decode_there(vllm_fleet: Fleet, vllm_chats: Chats) -> None:
    admin = vllm_fleet.admin()
    pools = {"w0": types_pb2.POOL_PREFILL, "w1": types_pb2.POOL_DECODE, "w2": types_pb2.POOL_DECODE}

    def set_policy(name: str) -> None:
        request = admin_pb2.SetPolicyRequest(name=name)
        once_available(lambda: admin.SetPolicy(request, timeout=WAIT_S))

    def set_pool(name: str, pool: types_pb2.Pool.ValueType = types_pb2.POOL_UNSPECIFIED) -> None:
        request = admin_pb2.SetPoolRequest(instance_id=name, pool=pool)
        once_available(lambda: admin.SetPool(request, timeout=WAIT_S))

    policies = admin.ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=WAIT_S).policies
    previous = next(policy.name for policy in policies if policy.active)
    set_policy("static_pools")
    try:
        for name, pool in pools.items():
            set_pool(name, pool)
        wait_until(lambda: {n: i.pool for n, i in vllm_fleet.instances().items()} == pools, "the pools")
        for _ in range(TRIES):
            own = vllm_fleet.late_placements()
            chat = vllm_chats.run(LONG.prompt)
            assert_expected(chat, LONG)
            moves = [m for m in vllm_fleet.migrations(chat.request_id) if m.state == COMMITTED]
            # Unless the scheduler answered too late, or the answer had ended before it was moved.
            if moves and vllm_fleet.late_placements() == own:
                break
        (move,) = moves
        assert (move.source_instance_id, move.reason, move.policy) == ("w0", "prefill done", "static_pools")
        assert move.target_instance_id in ("w1", "w2")
    finally:
        for name in pools:
            set_pool(name)
        set_policy(previous)
