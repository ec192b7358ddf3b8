"""A client that reconnects for the rest of its streams with the ID of its last event."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import httpx

from tests.waiting import WAIT_S

DONE = "[DONE]"
# The pause between two attempts, in seconds.
PAUSE_S = 0.05


@dataclass
class Received:
    """The events received of one stream: their data and IDs, in order."""

    events: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    connections: int = 0

    @property
    def last_id(self) -> str:
        """The value for the Last-Event-ID header."""
        return self.ids[-1] if self.ids else ""

    @property
    def text(self) -> str:
        """All text of the stream, reasoning and answers, by choice."""
        parts_of_choice: dict[int, list[str]] = {}
        for event in self.events:
            if event != DONE:
                for choice in json.loads(event)["choices"]:
                    delta = choice.get("delta") or {"content": choice.get("text")}
                    parts = parts_of_choice.setdefault(choice["index"], [])
                    parts += [delta[name] for name in ("reasoning", "content") if delta.get(name)]
                    calls = delta.get("tool_calls") or ()
                    parts += [call["function"].get("arguments") or "" for call in calls]
        return "\n".join("".join(parts_of_choice[index]) for index in sorted(parts_of_choice))

    @property
    def summary(self) -> tuple[str, list[str | None], object]:
        """Text, the finish reason of each choice, and usage."""
        chunks = [json.loads(event) for event in self.events if event != DONE]
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
        return self.text, [end for end in ends if end], usage

    def is_equal_to(self, other: Received) -> bool:
        """Return whether all events are equal, apart from ID and creation time of the answer."""
        return [_without_id_and_time(event) for event in self.events] == [
            _without_id_and_time(event) for event in other.events
        ]


def _without_id_and_time(event: str) -> object:
    return event if event == DONE else {**json.loads(event), "id": "", "created": 0}


async def read_events(answer: httpx.Response) -> AsyncGenerator[tuple[str, str], None]:
    """Yield (ID, data) of each complete event."""
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
    patience_s: float = WAIT_S,
) -> Received:
    """Post to the first of `urls` and read the stream to its end; reconnect to the next URL when it breaks.

    Raise TimeoutError after `patience_s` seconds, AssertionError if a front end refuses.
    """
    async with asyncio.timeout(patience_s):
        for url in itertools.cycle(urls):
            resume_headers = {"last-event-id": received.last_id} if received.last_id else {}
            try:
                async with client.stream(
                    "POST", f"{url}{path}", json=body, headers={**(headers or {}), **resume_headers}
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
