"""Clients of a fleet: the real OpenAI package, in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from openai import OpenAI

from examples.fleet import Chat, Prompt, stream_chat
from tests.e2e.fleet import MODEL


def client(http: str) -> OpenAI:
    """A client that does not retry: a test wants to see what happened the first time."""
    return OpenAI(base_url=f"{http}/v1", api_key="none", timeout=120, max_retries=0)


class Chats:
    """Streams under way."""

    def __init__(self, http: str, threads: int = 64) -> None:
        self._client = client(http)
        self._pool = ThreadPoolExecutor(threads)

    def start(
        self, prompt: Prompt, on_progress: Callable[[Chat], None] = lambda chat: None, /, **options: object
    ) -> Future[Chat]:
        """One more stream."""
        asked = {"temperature": 0, **options}
        return self._pool.submit(stream_chat, self._client, MODEL, prompt, asked, on_progress)

    def run(self, prompt: str, **options: object) -> Chat:
        """One stream, to its end."""
        return self.start(prompt, **options).result(timeout=120)

    def run_all(self, prompts: Sequence[str], **options: object) -> list[Chat]:
        """Many at once, in order."""
        return [f.result(timeout=180) for f in [self.start(p, **options) for p in prompts]]

    def close(self) -> None:
        """Wait for what is under way."""
        self._pool.shutdown(wait=True, cancel_futures=True)
