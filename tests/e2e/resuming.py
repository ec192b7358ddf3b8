"""A client that comes back for the rest of its streams, as one that uses the ids of events does."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import httpx

DONE = "[DONE]"
# Seconds of patience with front ends that are gone, and between two attempts.
PATIENCE_S = 60.0
PAUSE_S = 0.05


@dataclass
class Received:
    """One stream: the data of its events, in their order, and the id of the last one."""

    events: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    connections: int = 0

    @property
    def last_id(self) -> str:
        """What Last-Event-ID says."""
        return self.ids[-1] if self.ids else ""

    @property
    def text(self) -> str:
        """All text in it, reasoning and answers, by choice."""
        said: dict[int, list[str]] = {}
        for event in self.events:
            if event != DONE:
                for choice in json.loads(event)["choices"]:
                    delta = choice.get("delta") or {"content": choice.get("text")}
                    parts = said.setdefault(choice["index"], [])
                    parts += [delta[name] for name in ("reasoning", "content") if delta.get(name)]
                    calls = delta.get("tool_calls") or ()
                    parts += [call["function"].get("arguments") or "" for call in calls]
        return "\n".join("".join(said[index]) for index in sorted(said))

    @property
    def told(self) -> tuple[str, list[str | None], object]:
        """Text, why each choice ended, and usage."""
        chunks = [json.loads(event) for event in self.events if event != DONE]
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
        return self.text, [end for end in ends if end], usage

    def same(self, other: Received) -> bool:
        """Equal in every event, but for the id and the time of the answer."""
        return [_bare(event) for event in self.events] == [_bare(event) for event in other.events]


def _bare(event: str) -> object:
    return event if event == DONE else {**json.loads(event), "id": "", "created": 0}


async def read_events(answer: httpx.Response) -> AsyncGenerator[tuple[str, str], None]:
    """(id, data) of each event that has come whole."""
    event_id = data = ""
    async for line in answer.aiter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif not line and data:
            yield event_id, data
            event_id = data = ""


async def stream(
    client: httpx.AsyncClient,
    urls: Sequence[str],
    body: Mapping[str, object],
    received: Received,
    on_event: Callable[[Received], None] = lambda received: None,
    path: str = "/v1/chat/completions",
    headers: Mapping[str, str] | None = None,
    patience_s: float = PATIENCE_S,
) -> Received:
    """Post to the first of `urls`; whenever the connection breaks come back, to the next one."""
    async with asyncio.timeout(patience_s):
        for url in itertools.cycle(urls):
            resuming = {"last-event-id": received.last_id} if received.last_id else {}
            try:
                async with client.stream(
                    "POST", f"{url}{path}", json=body, headers={**(headers or {}), **resuming}
                ) as answer:
                    if answer.status_code != httpx.codes.OK:
                        raise AssertionError(f"{answer.status_code}: {(await answer.aread()).decode()}")
                    received.connections += 1
                    async with aclosing(read_events(answer)) as events:
                        async for event_id, data in events:
                            assert event_id, data
                            received.ids.append(event_id)
                            received.events.append(data)
                            on_event(received)
                if received.events[-1:] == [DONE]:
                    return received
            except httpx.TransportError:
                await asyncio.sleep(PAUSE_S)
    raise AssertionError("unreachable")
