"""A closed loop of users, each with one conversation after another, which begin with a shared system
prompt."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Final

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

TURNS: Final = 5
_SYSTEM: Final = "You are a patient counter who answers briefly and in order. " * 6
_CALL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer. Token counts are the server's; cached tokens are 0 if it does not report
    them."""

    conversation: str
    number: int
    # Seconds to the first chunk of the answer.
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    answer: str


class Users:
    """Concurrent users of an OpenAI server."""

    def __init__(self, url: str, model: str, users: int, conversations: int, answer_tokens: int = 4) -> None:
        """`conversations`: per run, of all users together."""
        self._url = url
        self._model = model
        self._users = users
        self._conversations = conversations
        self._answer_tokens = answer_tokens

    async def run(self, name: str) -> list[Turn]:
        """Run all conversations. Runs with the same name send the same requests."""
        remaining = list(range(self._conversations))
        turns: list[Turn] = []

        async def user(openai: AsyncOpenAI) -> None:
            while remaining:
                turns.extend(await self._conversation(openai, f"{name} {remaining.pop()}"))

        # New connections for each run: servers close those that were idle between two runs.
        async with (
            AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", timeout=_CALL_S, max_retries=0) as openai,
            asyncio.TaskGroup() as users,
        ):
            for _ in range(self._users):
                users.create_task(user(openai))
        return turns

    async def _conversation(self, openai: AsyncOpenAI, name: str) -> list[Turn]:
        rng = random.Random(name)
        messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": _SYSTEM}]
        turns: list[Turn] = []
        for number in range(TURNS):
            words = " ".join(str(rng.randrange(1_000)) for _ in range(25 if number else 120))
            messages.append({"role": "user", "content": f"{name}: {words}"})
            turns.append(await self._turn(openai, name, number, messages))
            messages.append({"role": "assistant", "content": turns[-1].answer})
            await asyncio.sleep(rng.uniform(0.05, 0.3))
        return turns

    async def _turn(
        self, openai: AsyncOpenAI, name: str, number: int, messages: list[ChatCompletionMessageParam]
    ) -> Turn:
        began_s = time.perf_counter()
        first_s = 0.0
        answer: list[str] = []
        prompt_tokens = cached_tokens = 0
        stream = await openai.chat.completions.create(
            model=self._model,
            messages=messages,
            max_tokens=self._answer_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            first_s = first_s or time.perf_counter() - began_s
            answer.extend(choice.delta.content or "" for choice in chunk.choices)
            if chunk.usage is not None:
                prompt_tokens = chunk.usage.prompt_tokens
                details = chunk.usage.prompt_tokens_details
                cached_tokens = 0 if details is None else details.cached_tokens or 0
        return Turn(name, number, first_s, prompt_tokens, cached_tokens, "".join(answer))


def later_ttfts_s(turns: list[Turn]) -> list[float]:
    """Return the seconds to the first chunk of each turn but the first of each conversation."""
    return [turn.ttft_s for turn in turns if turn.number]
