"""Clients of a fleet: the OpenAI package in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from openai import OpenAI

from examples.fleet import Chat, Prompt, stream_chat
from tailrace.tiny.task import Task
from tests.harness.fleet import MODEL
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S


def client(http: str, key: str = "none") -> OpenAI:
    """Return a client without retries, so that a test sees every failure."""
    return OpenAI(base_url=f"{http}/v1", api_key=key, timeout=WAIT_S, max_retries=0)


def assert_expected(chat: Chat, expected: Task) -> None:
    """Check reasoning, answer, finish reason and usage."""
    assert chat.reasoning.strip() == expected.thought
    assert chat.answer.strip() == expected.answer
    assert chat.finish_reason == "stop"
    assert chat.completion_tokens == expected.completion_tokens


class Chats:
    """Runs chat streams concurrently."""

    def __init__(self, http: str, threads: int = 64, key: str = "none") -> None:
        self._client = client(http, key)
        self._pool = ThreadPoolExecutor(threads)

    def start(
        self, prompt: Prompt, on_progress: Callable[[Chat], None] = lambda chat: None, /, **options: object
    ) -> Future[Chat]:
        """Start a stream and return its future. `on_progress` is called with the chat after each event."""
        request_options = {"temperature": 0, **options}
        return self._pool.submit(stream_chat, self._client, MODEL, prompt, request_options, on_progress)

    def begin(
        self, prompt: Prompt, far_enough: Callable[[Chat], bool] = lambda chat: True, /, **options: object
    ) -> tuple[Future[Chat], Chat]:
        """Start a stream; return its future and the chat so far, which grows, once that is `far_enough`, or
        the stream has ended. Raise what ended it."""
        seen: list[Chat] = []
        stream = self.start(prompt, seen.append, **options)
        wait_until(lambda: stream.done() or (bool(seen) and far_enough(seen[-1])), "the stream to begin")
        if stream.done():
            return stream, stream.result()
        return stream, seen[-1]

    def run(self, prompt: str, **options: object) -> Chat:
        """Run one stream to its end and return it."""
        return self.start(prompt, **options).result(timeout=WAIT_S)

    def run_all(self, prompts: Sequence[str], **options: object) -> list[Chat]:
        """Run streams concurrently and return them in the order of their prompts."""
        return [f.result(timeout=WAIT_S) for f in [self.start(p, **options) for p in prompts]]

    def close(self) -> None:
        """Wait for running streams and cancel those that have not started."""
        self._pool.shutdown(wait=True, cancel_futures=True)
