"""Migrate a streamed chat repeatedly to another worker while it runs, as an operator would."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import grpc
from openai import OpenAI

from examples.fleet import Chat, Fleet, Prompt, stream_chat
from tailrace.v1 import migration_pb2, types_pb2

_POLL_S: Final = 0.02
# After a failed migration.
_RETRY_S: Final = 0.1
_COMMITTED: Final = types_pb2.MIGRATION_STATE_COMMITTED


@dataclass(slots=True)
class Moves:
    """Results of the migrations of one stream."""

    committed: list[migration_pb2.MigrationRecord] = field(default_factory=list)
    # Why others failed, except because the stream ended first.
    failed: list[str] = field(default_factory=list)


class Mover:
    """Migrates one stream after each `every_tokens` tokens, in a thread; `close` ends it."""

    def __init__(self, fleet: Fleet, every_tokens: int, max_moves: int) -> None:
        self.moves = Moves()
        self._fleet = fleet
        self._every_tokens = every_tokens
        self._max_moves = max_moves
        self._request_id = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mover")
        self._thread.start()

    def on_progress(self, chat: Chat) -> None:
        """Set the stream to migrate."""
        self._request_id = chat.request_id

    def close(self) -> Moves:
        """End the thread; return the migrations."""
        self._stopped.set()
        self._thread.join()
        return self.moves

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S) and len(self.moves.committed) < self._max_moves:
            request = self._fleet.find(self._request_id) if self._request_id else None
            due = self._every_tokens * (len(self.moves.committed) + 1)
            if request is None or request.output_tokens < due or request.migrating:
                continue
            others = [name for name in self._fleet.instances() if name != request.instance_id]
            if others:
                self._move(request.request_id, others[0])

    def _move(self, request_id: str, target: str) -> None:
        try:
            record = self._fleet.migrate(request_id, target, "feature")
        except grpc.RpcError as error:
            reason = error.details() if isinstance(error, grpc.Call) else str(error)
        else:
            if record.state == _COMMITTED:
                self.moves.committed.append(record)
                return
            reason = record.error
        if not self._stopped.is_set() and self._fleet.find(request_id) is not None:
            self.moves.failed.append(reason or "")
        time.sleep(_RETRY_S)


def moved_chat(
    client: OpenAI,
    fleet: Fleet,
    model: str,
    prompt: Prompt,
    options: Mapping[str, object],
    every_tokens: int,
    max_moves: int,
) -> tuple[Chat, Moves]:
    """Run a chat, migrated after each `every_tokens` tokens, at most `max_moves` times."""
    mover = Mover(fleet, every_tokens, max_moves)
    try:
        chat = stream_chat(client, model, prompt, options, mover.on_progress)
    finally:
        moves = mover.close()
    return chat, moves
