"""Helpers of the examples: the admin API of the local cluster, and one streamed chat with its result."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from openai import APIConnectionError, OpenAI

from tailrace.cli.errors import CliError
from tailrace.local.state import Part, RunFolderUnusable, find_state
from tailrace.v1 import admin_pb2, admin_pb2_grpc, migration_pb2, types_pb2, worker_pb2

Prompt: TypeAlias = str | Sequence[Mapping[str, object]]
"""A user's message: text, or parts of it as OpenAI's API has them."""


def local_url() -> str:
    """Return the base URL of the local cluster's API, or of its default port if no cluster runs here."""
    try:
        state = find_state()
    except RunFolderUnusable as problem:
        sys.exit(str(problem))
    return f"{state.http if state is not None and state.http else 'http://127.0.0.1:8000'}/v1"


@contextmanager
def exit_on_connection_error(url: str) -> Iterator[None]:
    """End the script with one line if the cluster does not answer."""
    try:
        yield
    except CliError as problem:
        sys.exit(problem.format_message())
    except APIConnectionError:
        sys.exit(f"nothing answers at {url}: `make up` starts a cluster, --url names another")


def signal_part(part: Part, signum: signal.Signals) -> None:
    """Send a signal to a process of the local cluster and its children."""
    for pid in part.identity.session_members():
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


class Fleet:
    """The admin API: find requests, and migrate them."""

    def __init__(self, admin: admin_pb2_grpc.AdminStub) -> None:
        self._admin = admin

    def instances(self) -> list[str]:
        """Return the ids of the active instances."""
        reply = self._admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=5)
        active = types_pb2.INSTANCE_STATE_ACTIVE
        return sorted(i.instance_id for i in reply.instances if i.state == active)

    def find(self, request_id: str) -> admin_pb2.RequestInfo | None:
        """Return the running request whose id contains `request_id`, or None."""
        reply = self._admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=5)
        return next((r for r in reply.requests if request_id in r.request_id), None)

    def requests(self) -> list[admin_pb2.RequestInfo]:
        """Return all running requests."""
        return list(self._admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=5).requests)

    def migrate(
        self,
        request_id: str,
        target: str,
        reason: str = "example",
        mode: worker_pb2.CopyMode.ValueType = worker_pb2.COPY_MODE_PRE_COPY,
    ) -> migration_pb2.MigrationRecord:
        """Migrate a request and wait for the outcome; return the last record, which has it."""
        request = admin_pb2.AdminMigrateRequest(
            request_id=request_id, target_instance_id=target, reason=reason, mode=mode
        )
        record = migration_pb2.MigrationRecord()
        for update in self._admin.Migrate(request, timeout=30):
            record = update
        return record


@dataclass
class Chat:
    """The result of a streamed chat."""

    request_id: str = ""
    reasoning: str = ""
    answer: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # (token, logprob) of every answer token, when logprobs were asked for.
    logprobs: list[tuple[str, float]] = field(default_factory=list)

    def same_text_and_usage(self, other: Chat) -> bool:
        """Return whether a client would see the same, apart from the last bits of a logprob."""
        return (
            self.reasoning == other.reasoning
            and self.answer == other.answer
            and self.finish_reason == other.finish_reason
            and (self.prompt_tokens, self.completion_tokens) == (other.prompt_tokens, other.completion_tokens)
            and [t for t, _ in self.logprobs] == [t for t, _ in other.logprobs]
            and all(abs(a - b) < 1e-3 for (_, a), (_, b) in zip(self.logprobs, other.logprobs, strict=True))
        )


def stream_chat(
    client: OpenAI,
    model: str,
    prompt: Prompt,
    options: Mapping[str, object],
    on_progress: Callable[[Chat], None] = lambda chat: None,
) -> Chat:
    """Stream one chat with these sampling options; `on_progress` is called after every chunk."""
    chat = Chat()
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model=model,
        messages=[{"role": "user", "content": prompt}],
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    for chunk in stream:
        chat.request_id = chunk.id
        if chunk.usage is not None:
            chat.prompt_tokens = chunk.usage.prompt_tokens
            chat.completion_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            # vLLM calls the field `reasoning`; older clients and servers `reasoning_content`.
            delta = choice.delta
            chat.reasoning += (
                getattr(delta, "reasoning", None) or getattr(delta, "reasoning_content", None) or ""
            )
            chat.answer += delta.content or ""
            if choice.logprobs is not None:
                chat.logprobs.extend((t.token, t.logprob) for t in choice.logprobs.content or ())
            chat.finish_reason = choice.finish_reason or chat.finish_reason
        on_progress(chat)
    return chat


class Once:
    """Run each action once, in a thread of its own, when its condition first holds."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._fired: set[str] = set()

    def when(self, name: str, condition: bool, action: Callable[[], None]) -> None:
        """Start `action` if `condition` holds and `name` has not fired yet."""
        if condition and name not in self._fired:
            self._fired.add(name)
            thread = threading.Thread(target=action, name=name)
            thread.start()
            self._threads.append(thread)

    def join(self) -> None:
        """Wait for all threads that were started."""
        for thread in self._threads:
            thread.join(timeout=60)
