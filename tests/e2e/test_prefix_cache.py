"""Conversations on a fleet of real vLLM engines, placed where their prefixes are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tailrace.v1 import admin_pb2
from tests.e2e.chats import client
from tests.e2e.fleet import MODEL, Fleet
from tests.e2e.processes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

BLOCK = 32
TURNS = 3


@pytest.fixture
def fleet(vllm_fleet: Fleet) -> Iterator[Fleet]:
    """The shared fleet, by whatever policy."""
    yield vllm_fleet
    place_by(vllm_fleet, "least_loaded")


def place_by(fleet: Fleet, policy: str) -> None:
    """From now on."""
    fleet.admin().SetPolicy(admin_pb2.SetPolicyRequest(name=policy), timeout=10)

    def decides() -> bool:
        policies = fleet.admin().ListPolicies(admin_pb2.ListPoliciesRequest(), timeout=5).policies
        return any(each.active and each.name == policy for each in policies)

    wait_until(decides, f"{policy} to decide", 10)


@dataclass
class Conversation:
    """Its prompt is some eight blocks long, from the first token on no other's."""

    openai: OpenAI
    name: str
    salt: str | None = None
    messages: list[ChatCompletionMessageParam] = field(default_factory=list)
    # Of the last turn.
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def turn(self) -> None:
        """Ask once more."""
        asked = f"{self.name} {len(self.messages)}: " + "count " * 40
        self.messages.append({"role": "user", "content": asked})
        extra = {} if self.salt is None else {"cache_salt": self.salt}
        reply = self.openai.chat.completions.create(
            model=MODEL, messages=self.messages, max_tokens=8, temperature=0.0, extra_body=extra
        )
        self.messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        self.prompt_tokens = reply.usage.prompt_tokens
        self.cached_tokens = reply.usage.prompt_tokens_details.cached_tokens or 0


def cached_blocks(fleet: Fleet) -> int:
    """As the scheduler knows."""
    return sum(instance.cached_blocks for instance in fleet.instances().values())


def turn(fleet: Fleet, conversation: Conversation) -> None:
    """One turn, until the scheduler knows of its prompt's blocks."""
    before = cached_blocks(fleet)
    conversation.turn()
    new = (conversation.prompt_tokens - conversation.cached_tokens) // BLOCK
    wait_until(lambda: cached_blocks(fleet) >= before + new, f"{new} new blocks to be known", 10)


def test_conversations_find_their_prefixes(fleet: Fleet) -> None:
    """Also those that a scheduler has not seen, and nobody another's with a salt of its own."""
    openai = client(fleet.http)
    place_by(fleet, "round_robin")
    conversations = [Conversation(openai, f"talk {name}") for name in "abcdef"]
    before = {name: instance.cached_blocks for name, instance in fleet.instances().items()}
    for number in range(TURNS):
        for conversation in conversations:
            known = conversation.prompt_tokens
            turn(fleet, conversation)
            if number:
                assert conversation.cached_tokens >= known // BLOCK * BLOCK
            else:
                assert conversation.cached_tokens < 2 * BLOCK
        place_by(fleet, "prefix_affinity")
    grown = [name for name, i in fleet.instances().items() if i.cached_blocks > before[name] + 2 * TURNS]
    assert len(grown) == len(before)

    scheduler = fleet.processes["scheduler-0"]
    blocks = cached_blocks(fleet)
    scheduler.kill()
    fleet.mend()
    fleet.wait_leader()
    wait_until(lambda: cached_blocks(fleet) >= blocks, f"{blocks} blocks to be known again", 20)
    assert fleet.metric("scheduler-0", "tailrace_scheduler_cache_snapshots") >= 1
    for conversation in conversations:
        known = conversation.prompt_tokens
        turn(fleet, conversation)
        assert conversation.cached_tokens >= known // BLOCK * BLOCK
    total = "tailrace_scheduler_placed_cached_tokens_total"
    placed = fleet.metric("scheduler-0", total)
    assert placed == sum(conversation.cached_tokens for conversation in conversations)

    salted = Conversation(openai, "talk a", salt="another tenant")
    turn(fleet, salted)
    assert salted.cached_tokens == 0
    turn(fleet, salted)
    assert salted.cached_tokens > 0
