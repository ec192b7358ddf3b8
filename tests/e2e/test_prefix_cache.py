"""Conversations on a fleet of real vLLM engines, placed where their prefixes are cached."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tailrace.tiny.task import task
from tailrace.v1 import admin_pb2, migration_pb2, types_pb2
from tests.e2e.conftest import VLLM_KV_BLOCKS, VLLM_WORKERS
from tests.e2e.test_vllm_fleet import longer_than, move_while_running
from tests.harness.chats import Chats, assert_expected, client
from tests.harness.controlled import in_effect
from tests.harness.fleet import MODEL, Fleet
from tests.harness.processes import wait_until
from tests.harness.tries import TRIES, RequestEnded, before_it_ends, once_available
from tests.waiting import WAIT_S

pytestmark = pytest.mark.vllm

Found = TypeVar("Found")

BLOCK = 32
TURNS = 3
STALE_S = 10.0
EXPECTED = "tailrace_scheduler_placed_cached_tokens_total"


@pytest.fixture
def fleet(vllm_fleet: Fleet) -> Iterator[Fleet]:
    """The shared fleet; the test may change the policy."""
    yield vllm_fleet
    set_policy(vllm_fleet, "least_loaded")


def set_policy(fleet: Fleet, policy: str, **parameters: str) -> None:
    """Set the placement policy and wait until it is active."""
    request = admin_pb2.SetPolicyRequest(name=policy, parameters=parameters)
    once_available(lambda: fleet.admin().SetPolicy(request, timeout=WAIT_S))

    def decides() -> bool:
        policies = fleet.admin().ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=WAIT_S).policies
        return in_effect(policies, policy, parameters)

    wait_until(decides, f"{policy} to decide")


@dataclass
class Conversation:
    """A conversation whose prompt of some eight blocks shares no prefix with others."""

    openai: OpenAI
    name: str
    salt: str | None = None
    messages: list[ChatCompletionMessageParam] = field(default_factory=list)
    # Token counts of the last turn.
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def turn(self) -> None:
        """Send the next message."""
        prompt = f"{self.name} {len(self.messages)}: " + "count " * 40
        self.messages.append({"role": "user", "content": prompt})
        extra = {} if self.salt is None else {"cache_salt": self.salt}
        reply = self.openai.chat.completions.create(
            model=MODEL, messages=self.messages, max_tokens=8, temperature=0.0, extra_body=extra
        )
        self.messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        self.prompt_tokens = reply.usage.prompt_tokens
        self.cached_tokens = reply.usage.prompt_tokens_details.cached_tokens or 0


def cached_blocks(fleet: Fleet) -> int:
    """Return the number of cached blocks that the scheduler knows of."""
    return sum(instance.cached_blocks for instance in fleet.instances().values())


def host_memory_blocks(fleet: Fleet, name: str) -> int:
    """Return the number of a worker's blocks in host memory that the scheduler knows of."""
    return fleet.instances()[name].cached_host_blocks


def held_up(fleet: Fleet) -> float:
    """Return how often the machine was too busy for the scheduler or a worker to answer in time."""
    return fleet.late_placements() + fleet.silences()


def turn(fleet: Fleet, conversation: Conversation) -> None:
    """Run one turn and wait until the scheduler knows of its prompt's blocks and of its end."""
    before = cached_blocks(fleet)
    conversation.turn()
    new = (conversation.prompt_tokens - conversation.cached_tokens) // BLOCK
    wait_until(lambda: cached_blocks(fleet) >= before + new, f"{new} new blocks to be known")
    # Otherwise its instance counts as loaded, and policies may place the next turn elsewhere.
    wait_until(lambda: not fleet.requests(), "the scheduler to see the turn end")


def test_migration_copies_only_blocks_that_the_target_lacks(fleet: Fleet) -> None:
    """A request that returns to an earlier instance finds its blocks there."""
    expected = task("back", 100, 30)
    moments = [(f"{length} characters", longer_than(length)) for length in (400, 500, 600)]
    chats = Chats(fleet.http, 2)
    # The third move is back to where the first one went.
    before = fleet.metric("migration", "tailrace_migration_kv_held_bytes_total")
    records: list[migration_pb2.MigrationRecord] = []
    for number in range(TRIES):
        # With blocks of its own: a try that ended too soon has left its blocks at the targets.
        salted = {"extra_body": {"cache_salt": f"back {number}"}}
        records, chat = move_while_running(fleet, chats, expected.prompt, salted, moments)
        assert_expected(chat, expected)
        if len(records) == len(moments):
            break
    chats.close()
    assert len(records) == len(moments), f"it ended before it was moved so often, {TRIES} times"
    first, _, third = records
    assert third.target_instance_id == first.target_instance_id
    assert third.held_blocks >= first.tokens // BLOCK and third.tokens > first.tokens
    block_bytes = third.held_bytes // third.held_blocks
    assert first.bytes == sum(each.blocks for each in first.rounds) * block_bytes
    copied = sum(each.blocks for each in third.rounds)
    assert third.bytes == copied * block_bytes
    # The block that is being filled may be copied in each round.
    assert copied <= -(-third.tokens // BLOCK) - third.held_blocks + len(third.rounds)
    held = fleet.metric("migration", "tailrace_migration_kv_held_bytes_total") - before
    assert held >= third.held_bytes


def ask(fleet: Fleet, name: str, words: int = 300) -> tuple[str, int, int]:
    """Send a long prompt; return the answer, the number of prompt tokens and of cached ones."""
    conversation = Conversation(client(fleet.http), name)
    prompt = f"{name}: " + "count " * words
    reply = conversation.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": prompt}], max_tokens=12, temperature=0.0
    )
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    found = reply.usage.prompt_tokens_details.cached_tokens or 0
    return reply.choices[0].message.content or "", reply.usage.prompt_tokens, found


def pulls(fleet: Fleet, outcome: str) -> float:
    """Return the number of pulls with this outcome, summed over all running workers."""
    counts = 0.0
    for name in VLLM_WORKERS:
        if fleet.processes[name].alive:
            counts += fleet.metric(name, "tailrace_worker_pulls_total", f'outcome="{outcome}"')
    return counts


def submitted(fleet: Fleet) -> dict[str, float]:
    """Return how many requests each worker has been sent."""
    return {name: fleet.metric(name, "tailrace_worker_submitted_requests_total") for name in VLLM_WORKERS}


def wait_reported(fleet: Fleet, name: str) -> None:
    """Wait until the scheduler knows what the worker has cached by now."""
    # The first report may have been sent before.
    for _ in range(2):
        began_s = time.monotonic()

        def is_newer(began_s: float = began_s) -> bool:
            return fleet.instances()[name].report_age_s < time.monotonic() - began_s

        wait_until(is_newer, f"a report of {name}")


def draining(fleet: Fleet) -> set[str]:
    """Return the names of draining instances."""
    state = types_pb2.INSTANCE_STATE_DRAINING
    return {name for name, instance in fleet.instances().items() if instance.state == state}


def drain(fleet: Fleet, name: str, undo: bool = False) -> None:
    """Drain a worker and wait until its requests have ended; or undo it."""
    request = admin_pb2.DrainRequest(instance_id=name, undrain=undo)
    once_available(lambda: list(fleet.admin().Drain(request, timeout=WAIT_S)))


def undrain(fleet: Fleet) -> None:
    """Undrain all workers, also one that was killed: it is a suspect now, and would return drained."""
    for name in VLLM_WORKERS:
        drain(fleet, name, undo=True)


@dataclass
class DrainedHolder:
    """Context in which a single worker holds a prompt's prefix, and that worker is drained."""

    fleet: Fleet
    name: str
    holder: str = ""
    answer: str = ""
    prompt_tokens: int = 0

    def __enter__(self) -> DrainedHolder:
        prompts = [self.name, *(f"{self.name} again {number}" for number in range(1, TRIES))]
        for self.name in prompts:
            before, late = submitted(self.fleet), held_up(self.fleet)
            self.answer, self.prompt_tokens, found = ask(self.fleet, self.name)
            assert found < 2 * BLOCK
            after = submitted(self.fleet)
            holders = [name for name in after if after[name] > before[name]]
            # A worker that answers too late may compute the prompt, too.
            if len(holders) == 1 or held_up(self.fleet) == late:
                break
        (self.holder,) = holders
        wait_reported(self.fleet, self.holder)
        drain(self.fleet, self.holder)
        return self

    def __exit__(self, *_: object) -> None:
        undrain(self.fleet)

    @property
    def full_block_tokens(self) -> int:
        """Number of tokens in the prompt's full blocks, without the last token's block."""
        return (self.prompt_tokens - 1) // BLOCK * BLOCK


def placed_by_scheduler(
    fleet: Fleet, name: str, attempt: Callable[[DrainedHolder], Found]
) -> tuple[DrainedHolder, Found]:
    """Return what an attempt finds in which the scheduler placed every request, and the prefix's holder.

    On a busy machine the scheduler may answer too late, and the front end knows of no prefix: then the
    attempt is made again, with another prompt; it may raise RequestEnded then. So it is if a worker is
    silent for too long, and what it carries is recomputed.
    """
    set_policy(fleet, "tailrace", pull_margin="0")
    for number in range(TRIES):
        with DrainedHolder(fleet, f"{name} {number}") as held:
            before = held_up(fleet)
            with suppress(RequestEnded):
                found = attempt(held)
                if held_up(fleet) == before:
                    return held, found
    pytest.fail(f"in none of {TRIES} attempts did the scheduler place all requests in time")


def test_prefix_is_pulled_from_its_holder(fleet: Fleet) -> None:
    def attempt(held: DrainedHolder) -> tuple[str, int, float, float]:
        before, sent = pulls(fleet, "pulled"), sum(submitted(fleet).values())
        answer, _, found = ask(fleet, held.name)
        return answer, found, pulls(fleet, "pulled") - before, sum(submitted(fleet).values()) - sent

    held, (answer, found, pulled, sent) = placed_by_scheduler(fleet, "pulled", attempt)
    assert (answer, found) == (held.answer, held.full_block_tokens)
    # A worker may answer too late as well: the request is placed again then, and pulls again.
    assert 1 <= pulled <= sent


def test_prefix_corrupted_in_transit_is_recomputed(fleet: Fleet) -> None:
    def attempt(held: DrainedHolder) -> tuple[str, int, float]:
        before = pulls(fleet, "corrupt")
        fleet.arm({"corrupt": "kv"})
        answer, _, found = ask(fleet, held.name)
        fleet.disarm()
        return answer, found, pulls(fleet, "corrupt") - before

    held, (answer, found, corrupt) = placed_by_scheduler(fleet, "damaged", attempt)
    assert answer == held.answer and found < 2 * BLOCK
    assert corrupt == 1


def held_pull(fleet: Fleet, pool: ThreadPoolExecutor, name: str) -> Future[tuple[str, int, int]]:
    """Ask for a prompt, and wait until its prefix's pull is held. Raise RequestEnded if the scheduler or a
    worker was too late for it."""
    before = held_up(fleet)
    fleet.arm({"hold": "pull:connected", "seconds": 60})
    future = pool.submit(ask, fleet, name)
    try:
        fleet.wait_held("pull:connected", ended=future.done)
    except RequestEnded:
        fleet.disarm()
        assert held_up(fleet) > before, "nothing was pulled"
        raise
    return future


def test_prompt_is_computed_when_the_holder_dies_during_a_pull(fleet: Fleet) -> None:
    set_policy(fleet, "tailrace", pull_margin="0")

    def killed() -> None:
        with DrainedHolder(fleet, f"killed {next(numbers)}") as held, ThreadPoolExecutor(1) as pool:
            before = pulls(fleet, "lost")
            future = held_pull(fleet, pool, held.name)
            fleet.processes[held.holder].kill()
            fleet.disarm()
            answer, _, found = future.result(WAIT_S)
            assert answer == held.answer and found < 2 * BLOCK
            assert pulls(fleet, "lost") == before + 1

    numbers = itertools.count()
    before_it_ends(killed)


def test_concurrent_requests_share_one_pull(fleet: Fleet) -> None:
    def attempt(held: DrainedHolder) -> tuple[list[tuple[str, int, int]], float, float]:
        before, shared = pulls(fleet, "pulled"), pulls(fleet, "shared") + pulls(fleet, "held")
        fleet.arm({"hold": "pull:connected", "seconds": 60})
        placed = fleet.metric("frontend", "tailrace_frontend_placements_total")
        all_placed = placed + 6
        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(ask, fleet, held.name) for _ in range(6)]
            try:
                fleet.wait_held("pull:connected", ended=lambda: all(future.done() for future in futures))
                wait_until(
                    lambda: fleet.metric("frontend", "tailrace_frontend_placements_total") >= all_placed,
                    "all six to be placed while the first pull is held",
                )
            finally:
                fleet.disarm()
            results = [future.result(WAIT_S) for future in futures]
        shared = pulls(fleet, "shared") + pulls(fleet, "held") - shared
        return results, pulls(fleet, "pulled") - before, shared

    held, (results, pulled, shared) = placed_by_scheduler(fleet, "shared", attempt)
    assert [answer for answer, _, _ in results] == [held.answer] * 6
    # At most one pull per worker, and no request computed the pulled prefix.
    assert 1 <= pulled <= len(VLLM_WORKERS) - 1
    assert shared >= 1
    assert [found for _, _, found in results] == [held.full_block_tokens] * 6


@contextmanager
def reports_paused(fleet: Fleet) -> Iterator[None]:
    """Keep all reports of workers from the scheduler meanwhile."""
    fleet.processes["monitor"].freeze()
    try:
        yield
    finally:
        fleet.processes["monitor"].thaw()


def drain_others(fleet: Fleet, *names: str) -> None:
    """Drain all other workers, without waiting for their requests to end, which only reports would show."""
    undrain(fleet)
    for name in set(VLLM_WORKERS).difference(names):
        call = fleet.admin().Drain(admin_pb2.DrainRequest(instance_id=name), timeout=WAIT_S)
        next(call)
        call.cancel()
    wait_until(lambda: set(VLLM_WORKERS) - draining(fleet) == set(names), "the others to drain")


def occupy(fleet: Fleet, name: str) -> str:
    """Run a long request with the same prompt as `ask` and return its answer."""
    prompt = f"{name}: " + "count " * 300
    reply = client(fleet.http).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=1000,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    return reply.choices[0].message.content or ""


def copied_to(fleet: Fleet) -> list[str]:
    """Return the workers that a prefix was copied to ahead of need."""
    metric, outcome = "tailrace_worker_prefix_copies_total", 'outcome="pulled"'
    return [name for name in VLLM_WORKERS if fleet.metric(name, metric, outcome)]


# A prefix is hot for ten seconds after its requests have arrived. On a busy machine, that can be over before
# the other workers are undrained.
HOT_TRIES = 6


@pytest.mark.slow
def test_hot_prefix_is_copied_ahead_of_need(fleet: Fleet) -> None:
    """A single worker holds the prefix and is loaded, while the others are idle."""
    set_policy(fleet, "tailrace", copy_ahead="true", pull_margin="0", margin="1000000")
    assert any(copies_ahead(fleet, f"ahead-{number}") for number in range(HOT_TRIES))


def copies_ahead(fleet: Fleet, name: str) -> bool:
    """Return whether the prefix was copied while it was hot, and check the copy."""
    with DrainedHolder(fleet, name) as held, ThreadPoolExecutor(8) as pool:
        drain_others(fleet, held.holder)
        running = [pool.submit(occupy, fleet, held.name) for _ in range(8)]

        def all_on_holder() -> bool:
            return sum(request.instance_id == held.holder for request in fleet.requests()) == 8

        def ended() -> bool:
            return all(each.done() for each in running)

        wait_until(lambda: all_on_holder() or ended(), "all to be on the holder")
        undrain(fleet)
        wait_until(lambda: bool(copied_to(fleet)) or ended(), "the prefix to be copied")
        if not (targets := copied_to(fleet)):
            return False
        assert len({each.result(4 * WAIT_S) for each in running}) == 1
        before = pulls(fleet, "pulled")
        drain_others(fleet, targets[0])
        answer, _, found = ask(fleet, held.name)
        assert (answer, found) == (held.answer, held.full_block_tokens)
        assert targets[0] != held.holder and pulls(fleet, "pulled") == before
        return True


@pytest.mark.slow
def test_evicted_prefix_is_lent_from_host_memory(fleet: Fleet) -> None:
    """For ten seconds no reports reach the scheduler, and the holder's device evicts the prompt."""
    set_policy(fleet, "tailrace", pull_margin="0")
    assert any(lent_from_host_memory(fleet, f"stale {number}") for number in range(TRIES))


def lent_from_host_memory(fleet: Fleet, name: str) -> bool:
    """Check that a prefix is lent; return whether the scheduler has placed all requests for it in time."""
    held = DrainedHolder(fleet, name)
    try:
        with held, reports_paused(fleet):
            drain_others(fleet, held.holder)
            began_s, computed = time.monotonic(), 0
            while computed < int(VLLM_KV_BLOCKS) or time.monotonic() < began_s + STALE_S:
                _, tokens, known = ask(fleet, f"another {name} {computed}", words=400)
                computed += (tokens - known) // BLOCK
            drain_others(fleet, *(other for other in VLLM_WORKERS if other != held.holder))
            pulled, expected = pulls(fleet, "pulled"), fleet.metric("scheduler-0", EXPECTED)
            own = fleet.late_placements()
            answer, _, found = ask(fleet, held.name)
            if fleet.late_placements() > own:
                return False
            assert (answer, found) == (held.answer, held.full_block_tokens)
            assert pulls(fleet, "pulled") == pulled + 1
            assert fleet.metric("scheduler-0", EXPECTED) == expected + held.full_block_tokens
        # When reports arrive again, the scheduler knows of both memories.
        blocks = held.full_block_tokens // BLOCK
        wait_until(lambda: host_memory_blocks(fleet, held.holder) >= blocks, "host memory to be known")
        drain_others(fleet, held.holder)
        loaded = fleet.metric(held.holder, "tailrace_worker_host_cached_prompt_tokens_total")
        answer, _, found = ask(fleet, held.name)
        assert (answer, found) == (held.answer, held.full_block_tokens)
        loaded = fleet.metric(held.holder, "tailrace_worker_host_cached_prompt_tokens_total") - loaded
        assert loaded == held.full_block_tokens
        return True
    finally:
        undrain(fleet)
        # Its cache is full: new blocks would evict as many, so no block count would grow in later tests.
        fleet.processes[held.holder].kill()
        fleet.repair()
        fleet.wait_instances(VLLM_WORKERS)


def test_pull_survives_a_scheduler_restart(fleet: Fleet) -> None:
    set_policy(fleet, "tailrace", pull_margin="0")

    def restarted() -> None:
        with DrainedHolder(fleet, f"restart {next(numbers)}") as held, ThreadPoolExecutor(1) as pool:
            before, blocks = pulls(fleet, "pulled"), cached_blocks(fleet)
            future = held_pull(fleet, pool, held.name)
            fleet.processes["scheduler-0"].kill()
            fleet.repair()
            fleet.wait_leader()
            fleet.disarm()
            assert future.result(WAIT_S) == (held.answer, held.prompt_tokens, held.full_block_tokens)
            assert pulls(fleet, "pulled") == before + 1
            # It requests snapshots from workers whose first update it missed, and then knows the pulled
            # blocks.
            pulled = held.full_block_tokens // BLOCK
            wait_until(lambda: cached_blocks(fleet) >= blocks + pulled, "the pulled blocks to be known")
            assert fleet.metric("scheduler-0", "tailrace_scheduler_cache_snapshots") >= 1

    numbers = itertools.count()
    before_it_ends(restarted)


def test_conversations_find_their_prefixes(fleet: Fleet) -> None:
    """Also after a scheduler restart, and never across different cache salts."""
    openai = client(fleet.http)
    set_policy(fleet, "round_robin")
    conversations = [Conversation(openai, f"talk {name}") for name in "abcdef"]
    before = {name: instance.cached_blocks for name, instance in fleet.instances().items()}
    found_again = 0
    for number in range(TURNS):
        for conversation in conversations:
            known, late = conversation.prompt_tokens, fleet.late_placements()
            turn(fleet, conversation)
            if number and fleet.late_placements() > late:
                # On a busy machine the scheduler may not answer within the front end's second.
                continue
            if number:
                assert conversation.cached_tokens >= known // BLOCK * BLOCK
                found_again += 1
            else:
                assert conversation.cached_tokens < 2 * BLOCK
        set_policy(fleet, "prefix_affinity")
    assert found_again
    grown = [name for name, i in fleet.instances().items() if i.cached_blocks > before[name] + 2 * TURNS]
    assert len(grown) == len(before)

    scheduler = fleet.processes["scheduler-0"]
    blocks = cached_blocks(fleet)
    scheduler.kill()
    fleet.repair()
    fleet.wait_leader()
    wait_until(lambda: cached_blocks(fleet) >= blocks, f"{blocks} blocks to be known again")
    assert fleet.metric("scheduler-0", "tailrace_scheduler_cache_snapshots") >= 1
    decided = []
    for conversation in conversations:
        known, own = conversation.prompt_tokens, fleet.late_placements()
        turn(fleet, conversation)
        # On a busy machine the new scheduler may not answer within the front end's second.
        if fleet.late_placements() == own:
            assert conversation.cached_tokens >= known // BLOCK * BLOCK
            decided.append(conversation)
    assert decided
    placed = fleet.metric("scheduler-0", EXPECTED)
    found = sum(conversation.cached_tokens for conversation in decided)
    # It counts those that it answered too late, too.
    assert placed == found or (placed > found and len(decided) < len(conversations))

    salted = Conversation(openai, "talk a", salt="another tenant")
    turn(fleet, salted)
    assert salted.cached_tokens == 0
    for _ in range(TRIES):
        own = fleet.late_placements()
        turn(fleet, salted)
        if fleet.late_placements() == own:
            break
    assert salted.cached_tokens > 0
