"""Every answer under load against the answer of the same prompt on an idle fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.loadgen import run_stream
from benchmarks.real.chat import Answer, chat_request, read_chat
from benchmarks.real.fleet import WORKERS, Fleet
from benchmarks.real.prompts import longest, messages
from benchmarks.servers import MODEL
from tailrace.tiny.task import Task
from tailrace.tiny.task import check as check_task

# Times that the undisturbed answers are asked for, until nothing was preempted.
_TRIES: Final = 4


class Disturbed(RuntimeError):
    """The fleet was not idle enough, or the model is not what it ought to be: nothing can be compared."""


@dataclass(slots=True)
class References:
    """Undisturbed answers, and how fast they came."""

    answers: dict[Task, Answer] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of the whole fleet, with two streams a worker."""
        return self.tokens / self.seconds

    async def learn(self, fleet: Fleet, tasks: Sequence[Task], most_wrong: float = 0.0) -> list[Task]:
        """Ask for each prompt not yet known, two at a time a worker, under a policy that moves nothing.

        Asks again when something was preempted or migrated. Returns those that the model answers rightly.
        Raises Disturbed when asking again does not help, or when more than this share of answers is wrong.
        """
        unknown = [each for each in dict.fromkeys(tasks) if each not in self.answers]
        await self._learn(fleet, unknown)
        wrong = {each for each in tasks if not _right(each, self.answers[each])}
        if len(wrong) > most_wrong * len(tasks):
            first = next(iter(wrong))
            raise Disturbed(
                f"{len(wrong)} of {len(tasks)} undisturbed answers are not the only right one; "
                f"to {first.prompt!r} it is {self.answers[first]}"
            )
        return [each for each in tasks if each not in wrong]

    async def _learn(self, fleet: Fleet, unknown: Sequence[Task]) -> None:
        if not unknown:
            return
        for _ in range(_TRIES):
            await fleet.clear()
            before, moved = await fleet.counted(), len(await fleet.migrations())
            slots = asyncio.Semaphore(2 * WORKERS)
            began_s = time.perf_counter()
            await asyncio.gather(*(self._ask(fleet, each, slots) for each in unknown))
            took_s = time.perf_counter() - began_s
            done = (await fleet.counted()).since(before)
            if not done.preemptions and len(await fleet.migrations()) == moved:
                self.seconds += took_s
                self.tokens += done.tokens
                return
            # Three may have met on one worker, where one had just ended and another was not seen yet.
        raise Disturbed(
            f"something was preempted or moved in each of {_TRIES} tries to take undisturbed answers"
        )

    async def _ask(self, fleet: Fleet, asked: Task, slots: asyncio.Semaphore) -> None:
        async with slots:
            request = chat_request(fleet.url, MODEL, messages(asked), longest([asked]))
            result = await run_stream(fleet.url, request)
        if result.error:
            raise Disturbed(f"{asked.prompt!r}: {result.error}")
        answer, _ = read_chat(result, 1.0)
        self.answers[asked] = answer

    def same(self, asked: Task, answer: Answer) -> bool:
        """Whether it is the undisturbed answer: text, reasoning, usage and finish reason."""
        return self.answers[asked] == answer


def _right(asked: Task, answer: Answer) -> bool:
    return check_task(asked, answer.reasoning, answer.text).right
