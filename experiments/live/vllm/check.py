"""Compare every answer under load with the answer to the same prompt on an idle fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from experiments.live.vllm.chat import Answer, chat_request, read_chat
from experiments.live.vllm.prompts import max_completion_tokens, messages
from tailrace.tiny.task import Task
from tailrace.tiny.task import check as check_task
from tests.harness.loadgen import run_stream
from tests.harness.servers import MODEL
from tests.harness.vllm_fleet import WORKERS, Fleet

# Attempts to record undisturbed answers without preemptions.
_TRIES: Final = 4


class Disturbed(RuntimeError):
    """The fleet was not idle, or the model is not as expected: nothing can be compared."""


@dataclass(slots=True)
class References:
    """Undisturbed answers, and the rate at which they were generated."""

    answers: dict[Task, Answer] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole fleet, with two streams per worker."""
        return self.tokens / self.seconds

    async def record_answers(
        self, fleet: Fleet, tasks: Sequence[Task], max_wrong_share: float = 0.0
    ) -> list[Task]:
        """Record the answer to each new prompt, two at a time per worker, under a policy that migrates
        nothing.

        Repeat this if a request was preempted or migrated. Return the tasks that the model answers correctly.
        Raise Disturbed if repeating does not help, or if more than this share of answers is wrong.
        """
        new = [each for each in dict.fromkeys(tasks) if each not in self.answers]
        await self._record_answers(fleet, new)
        wrong = {each for each in tasks if not _is_correct(each, self.answers[each])}
        if len(wrong) > max_wrong_share * len(tasks):
            first = next(iter(wrong))
            raise Disturbed(
                f"{len(wrong)} of {len(tasks)} undisturbed answers are wrong; "
                f"to {first.prompt!r} the answer was {self.answers[first]}"
            )
        return [each for each in tasks if each not in wrong]

    async def _record_answers(self, fleet: Fleet, new: Sequence[Task]) -> None:
        if not new:
            return
        for _ in range(_TRIES):
            await fleet.clear()
            before, moved = await fleet.counters(), len(await fleet.migrations())
            slots = asyncio.Semaphore(2 * WORKERS)
            began_s = time.perf_counter()
            await asyncio.gather(*(self._ask(fleet, each, slots) for each in new))
            took_s = time.perf_counter() - began_s
            done = (await fleet.counters()).since(before)
            if not done.preemptions and len(await fleet.migrations()) == moved:
                self.seconds += took_s
                self.tokens += done.tokens
                return
            # Three may have run on one worker, before a report showed the third.
        raise Disturbed(
            f"a request was preempted or migrated in each of {_TRIES} attempts to record undisturbed answers"
        )

    async def _ask(self, fleet: Fleet, question: Task, slots: asyncio.Semaphore) -> None:
        async with slots:
            request = chat_request(fleet.url, MODEL, messages(question), max_completion_tokens([question]))
            result = await run_stream(fleet.url, request)
        if result.error:
            raise Disturbed(f"{question.prompt!r}: {result.error}")
        answer, _ = read_chat(result, 1.0)
        self.answers[question] = answer

    def is_equal(self, question: Task, answer: Answer) -> bool:
        """Return whether it equals the undisturbed answer: text, reasoning, usage and finish reason."""
        return self.answers[question] == answer


def _is_correct(question: Task, answer: Answer) -> bool:
    return check_task(question, answer.reasoning, answer.text).right
