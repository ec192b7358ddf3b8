"""The Anthropic package: messages, streamed and not, tools, and counted tokens."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from common import MAX_TOKENS, SCHEMA, Cases, main

_WAIT_S = 600.0


def cases(url: str, model: str, prompts: list[str]) -> Cases:
    """Return the cases for a server at `url`."""
    client: Any = Anthropic(base_url=url, api_key="none", timeout=_WAIT_S, max_retries=0)

    def ask(prompt: str, **options: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        # Newer versions of the package have no parameter for it; vLLM's API does.
        options["extra_body"] = {"temperature": 0}
        return {"model": model, "max_tokens": MAX_TOKENS, "messages": messages, **options}

    def streamed(prompt: str) -> object:
        with client.messages.stream(**ask(prompt)) as stream:
            events = [event.type for event in stream]
            return [sorted(set(events)), parts(stream.get_final_message())]

    def tool(prompt: str) -> object:
        tools = [{"name": "turn", "description": "Turn.", "input_schema": SCHEMA}]
        request = ask(prompt, tools=tools, tool_choice={"type": "tool", "name": "turn"})
        return parts(client.messages.create(**request))

    def count(prompt: str) -> object:
        messages = [{"role": "user", "content": prompt}]
        return client.messages.count_tokens(model=model, messages=messages).input_tokens

    found: dict[str, Any] = {}
    for number, prompt in enumerate(prompts):
        found[f"message, streamed {number}"] = lambda prompt=prompt: streamed(prompt)
    found["message"] = lambda: parts(client.messages.create(**ask(prompts[0])))
    found["tool"] = lambda: tool(prompts[0])
    found["count of tokens"] = lambda: count(prompts[0])
    return found


def parts(message: Any) -> object:
    """Return the parts of a message without their ids, its stop reason and its usage."""
    kept = ("type", "text", "thinking", "name", "input")
    content = [
        {key: value for key, value in part.to_dict().items() if key in kept} for part in message.content
    ]
    return [content, message.stop_reason, message.usage.input_tokens, message.usage.output_tokens]


if __name__ == "__main__":
    main(cases)
