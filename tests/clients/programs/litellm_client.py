"""LiteLLM's package, with its provider for vLLM: chat and text completions, streamed and not."""

from __future__ import annotations

from typing import Any

import litellm
from common import FORCED_TOOL, Cases, main, tool_calls

_WAIT_S = 600.0


def cases(url: str, model: str, prompts: list[str]) -> Cases:
    """Return the cases for a server at `url`."""
    server = {"api_base": f"{url}/v1", "api_key": "none", "timeout": _WAIT_S, "num_retries": 0}

    def ask(prompt: str, **options: Any) -> Any:
        messages = [{"role": "user", "content": prompt}]
        return litellm.completion(
            model=f"hosted_vllm/{model}", messages=messages, temperature=0, **server, **options
        )

    def streamed(prompt: str) -> object:
        chunks = list(ask(prompt, stream=True, stream_options={"include_usage": True}))
        (choice,) = litellm.stream_chunk_builder(chunks).choices
        return message(choice)

    def tool(prompt: str) -> object:
        return tool_calls(ask(prompt, **FORCED_TOOL))

    def text(prompt: str) -> object:
        reply = litellm.text_completion(
            model=f"hosted_vllm/{model}", prompt=prompt, temperature=0, max_tokens=150, **server
        )
        return reply.choices[0].text

    found: dict[str, Any] = {}
    for number, prompt in enumerate(prompts):
        found[f"chat, streamed {number}"] = lambda prompt=prompt: streamed(prompt)
    found["chat"] = lambda: message(ask(prompts[0]).choices[0])
    found["tool"] = lambda: tool(prompts[0])
    found["completion"] = lambda: text(prompts[0])
    return found


def message(choice: Any) -> object:
    """Return content, reasoning and finish reason of a choice."""
    reasoning = getattr(choice.message, "reasoning_content", None)
    return [choice.message.content, reasoning, choice.finish_reason]


if __name__ == "__main__":
    main(cases)
