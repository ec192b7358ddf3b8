"""A prompt that crashes engines: its request is ended, and all others are only delayed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from frontend_svc import recovery
from frontend_svc.admission import Refusal
from frontend_svc.settings import Limits
from tailrace.wire.outputs import FinishReason
from tests.frontend.conftest import Rig, eventually, open_rig
from tests.frontend.fleet import record
from tests.frontend.simulated_worker import SimulatedWorker
from tests.waiting import WAIT_S
from worker_agent.engine.simulated import SimulatedFaults, SimulatedSettings
from worker_agent.engine.simulated.script import Script, read_vocabulary

# A step takes some 7 ms: fifty requests live for half a second.
SETTINGS = SimulatedSettings(max_num_seqs=64, kv_blocks=2048, reasoning_mean_tokens=0)
CULPRIT = tuple(b"the prompt that kills any engine")
TOKENS = 60


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let losses be explained and suspects be cleared, however long a busy machine takes for it."""
    for name in ("EXPLAIN_S", "WIDEN_S", "EXCLUSIVE_S"):
        monkeypatch.setattr(recovery, name, WAIT_S)


def expected_tokens(rig: Rig, prompt: list[int]) -> list[int]:
    """Return the simulated model's answer to the prompt."""
    vocabulary = read_vocabulary(SETTINGS.tokenizer, SETTINGS.think, SETTINGS.end_think)
    script = Script(prompt, rig.front.sampling(TOKENS, None), SETTINGS, vocabulary)
    return [script.token(index) for index in range(TOKENS)]


@pytest.mark.parametrize("says_goodbye", [True, False], ids=["says goodbye", "vanishes"])
@pytest.mark.parametrize("index", [0, 20])
async def test_crashing_request_kills_at_most_two_engines_and_its_neighbours_finish(
    rig: Rig, says_goodbye: bool, index: int
) -> None:
    faults = SimulatedFaults(die_on_prompt=CULPRIT, die_at_index=index)
    workers = [SimulatedWorker(f"w{n}", SETTINGS, faults, says_goodbye) for n in range(3)]
    for worker in workers:
        await rig.stack.enter_async_context(worker.running())
        rig.members.instances[worker.instance_id] = record(worker.instance_id, worker.address)
    rig.members.changed()
    await eventually(lambda: len(rig.engine.workers.attached()) == 3)
    await rig.front.ready()
    prompts = {f"n{number}": list(b"neighbour %02d" % number) for number in range(50)}
    names = list(prompts)
    for name in names[:25]:
        await rig.front.add(name, prompts[name], TOKENS)
    await rig.front.until(lambda: len(rig.front.tokens["n24"]) > 5)
    await rig.front.add("culprit", list(CULPRIT), TOKENS)
    for name in names[25:]:
        await rig.front.add(name, prompts[name], TOKENS)

    end = await rig.front.end_of("culprit")
    refusal = Refusal.decode(end.stop_reason)
    assert end.finish_reason == FinishReason.ERROR
    assert refusal is not None and refusal.status == 500
    assert "on two engines when they died" in refusal.message
    for name in names:
        assert (await rig.front.end_of(name)).finish_reason == FinishReason.LENGTH, name
        assert rig.front.tokens[name] == expected_tokens(rig, prompts[name]), name

    assert sum(worker.died for worker in workers) == 2
    submitted = [name for worker in workers for name in worker.submitted]
    assert submitted.count("culprit") == 2
    assert rig.count("engine_deaths_total") == 2
    assert rig.count("requests_total", outcome="error") == 1
    # The remaining engine serves the next request.
    await rig.front.add("next", list(b"next"), TOKENS)
    await rig.front.end_of("next")
    assert rig.front.tokens["next"] == expected_tokens(rig, list(b"next"))
    await asyncio.sleep(0)


async def test_crashing_prompt_of_another_front_end_ends_no_request_of_this_one(
    rig: Rig, tmp_path: Path
) -> None:
    """Both front ends lose streams on the first engine, and neither knows of the other's suspects."""
    faults = SimulatedFaults(die_on_prompt=CULPRIT)
    workers = [SimulatedWorker(f"w{n}", SETTINGS, faults, True) for n in range(3)]
    (tmp_path / "other").mkdir()
    async with open_rig(tmp_path / "other", Limits(), "f1") as other:
        for worker in workers:
            await rig.stack.enter_async_context(worker.running())
        for each in (rig, other):
            for worker in workers:
                each.members.instances[worker.instance_id] = record(worker.instance_id, worker.address)
            each.members.changed()
            await eventually(lambda each=each: len(each.engine.workers.attached()) == 3)  # type: ignore[misc]
            await each.front.ready()
        # One request per engine: after a crash it is the only suspect here, as the culprit is elsewhere.
        prompts = {f"n{number}": list(b"neighbour %02d" % number) for number in range(3)}
        for name, prompt in prompts.items():
            await rig.front.add(name, prompt, TOKENS)
        await rig.front.until(lambda: all(len(rig.front.tokens[name]) > 5 for name in prompts))
        await other.front.add("culprit", list(CULPRIT), TOKENS)
        refusal = Refusal.decode((await other.front.end_of("culprit")).stop_reason)
        assert refusal is not None and "when they died" in refusal.message
        for name, prompt in prompts.items():
            assert (await rig.front.end_of(name)).finish_reason == FinishReason.LENGTH, name
            assert rig.front.tokens[name] == expected_tokens(rig, prompt), name
        assert sum(worker.died for worker in workers) == 2
