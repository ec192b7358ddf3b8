"""Commands to a vLLM engine that outlive the deadline or the caller."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.waiting import WAIT_S

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.vllm.core import EngineParts
from worker_agent.engine.vllm.engine import VllmEngine
from worker_agent.settings import EngineOptions

pytestmark = pytest.mark.vllm


class Commands:
    """A thread that runs commands one after the other, as the engine's does between steps."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        self._inbox.put(command)

    def finish(self) -> None:
        """Run all commands, and end."""
        self._inbox.put(None)
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        while (command := self._inbox.get()) is not None:
            command()


@pytest.fixture
def commands() -> Iterator[Commands]:
    thread = Commands()
    yield thread
    thread.finish()


@pytest.fixture
def engine(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    """Return an engine without a model."""
    made = VllmEngine(EngineOptions())
    monkeypatch.setattr(made, "_thread", commands)
    monkeypatch.setattr(made, "_parts", None, raising=False)
    return made


async def test_a_command_that_has_begun_is_waited_for(engine: VllmEngine) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def command(parts: EngineParts, done: Callable[[str], None]) -> None:
        begun.set()
        go_on.wait(WAIT_S)
        done("reserved")

    asked = asyncio.create_task(engine._ask(command, 0.05))
    await asyncio.sleep(0)
    # Without an await: its deadline cannot pass before it has begun.
    assert begun.wait(WAIT_S)
    done, _ = await asyncio.wait({asked}, timeout=0.5)
    assert not done
    go_on.set()
    assert await asked == "reserved"


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_command_that_was_given_up_never_begins(
    engine: VllmEngine, commands: Commands, cancelled: bool
) -> None:
    step, begun = threading.Event(), threading.Event()

    def wait() -> None:
        step.wait(WAIT_S)

    def command(parts: EngineParts, done: Callable[[str], None]) -> None:
        begun.set()

    commands.post(wait)
    asked = asyncio.create_task(engine._ask(command, WAIT_S if cancelled else 0.05))
    if cancelled:
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    else:
        with pytest.raises(EngineRefusal, match="did not answer"):
            await asked
    # It ends with the event loop's turn in which its future is told.
    await asyncio.sleep(0)
    step.set()
    await asyncio.to_thread(commands.finish)
    assert not begun.is_set()


async def test_a_command_without_end_is_refused(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_agent.engine.vllm.engine._COMMAND_DEADLINE_S", 0.05)
    with pytest.raises(EngineRefusal, match="did not answer"):
        await engine._ask(lambda parts, done: None, 0.05)
