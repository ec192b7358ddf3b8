"""SIGKILL to each party in each step of a migration, on simulated engines: answers are right, KV is freed.

test_vllm_fleet.py has one case per step with vLLM.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from examples.fleet import Chat
from tests.harness.chats import Chats
from tests.harness.fleet import Fleet
from tests.harness.tries import before_it_ends
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

STEPS = {
    "open": "import:open",
    "pre-copy": "import:pre_copy",
    "stop-and-copy": "import:paused",
    "commit": "import:adopt",
}
VICTIMS = ("source", "target", "migration", "scheduler")
# Every second case runs only in make soak; the others cover each step and each victim.
CASES = [
    pytest.param(step, victim, id=f"{step}-{victim}", marks=pytest.mark.slow if (row + column) % 2 else ())
    for row, step in enumerate(STEPS)
    for column, victim in enumerate(VICTIMS)
]
PROMPT = "A prompt that a simulated engine answers at some length, the same on every instance."


@pytest.fixture(scope="module")
def undisturbed(simulated_session: Fleet) -> Chat:
    """The answer to the prompt without disturbance."""
    chats = Chats(simulated_session.http)
    try:
        return chats.run(PROMPT, max_tokens=MAX_TOKENS, extra_body={"min_tokens": MAX_TOKENS})
    finally:
        chats.close()


MAX_TOKENS = 400


@pytest.mark.parametrize(("step", "victim"), CASES)
def test_stream_survives_a_kill_at_a_migration_step(
    simulated_fleet: Fleet, simulated_chats: Chats, undisturbed: Chat, step: str, victim: str
) -> None:
    def held() -> tuple[Future[Chat], str, str, threading.Thread]:
        """Start a stream and hold its migration; return it, source, target, and who waits for the end."""
        stream, chat = simulated_chats.begin(
            PROMPT,
            lambda chat: len(chat.reasoning) + len(chat.answer) > 20,
            max_tokens=MAX_TOKENS,
            extra_body={"min_tokens": MAX_TOKENS},
        )
        placed = simulated_fleet.wait_request(chat.request_id, ended=stream.done)
        target = next(name for name in simulated_fleet.instances() if name != placed.instance_id)
        mover = simulated_fleet.hold_migration(placed.request_id, target, STEPS[step], ended=stream.done)
        return stream, placed.instance_id, target, mover

    stream, source, target, mover = before_it_ends(held)
    victims = {"source": source, "target": target, "migration": "migration"}
    name = victims[victim] if victim in victims else simulated_fleet.leader()
    simulated_fleet.processes[name].kill()
    simulated_fleet.disarm()
    assert stream.result(timeout=WAIT_S).same_text_and_usage(undisturbed)
    simulated_fleet.repair()
    simulated_fleet.wait_idle()
    mover.join(timeout=WAIT_S)
    assert not mover.is_alive()
