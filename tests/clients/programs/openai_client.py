"""The OpenAI package: chat, completions and responses, streamed and not."""

from __future__ import annotations

from typing import Any

from common import FORCED_TOOL, MAX_TOKENS, SCHEMA, Cases, main, tool_calls
from openai import NotFoundError, OpenAI

_WAIT_S = 600.0


def counts(usage: Any) -> object:
    """Return the numbers of tokens of the prompt, the answer, and of the reasoning in it."""
    details = usage.completion_tokens_details
    return [usage.prompt_tokens, usage.completion_tokens, details and details.reasoning_tokens]


def cases(url: str, model: str, prompts: list[str]) -> Cases:
    """Return the cases for a server at `url`."""
    client: Any = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=_WAIT_S, max_retries=0)

    def ask(prompt: str, **options: Any) -> Any:
        messages = [{"role": "user", "content": prompt}]
        return client.chat.completions.create(model=model, messages=messages, temperature=0, **options)

    def streamed(prompt: str) -> object:
        answer: dict[str, Any] = {"reasoning": "", "content": "", "finish_reason": None, "usage": None}
        for chunk in ask(prompt, stream=True, stream_options={"include_usage": True}):
            if chunk.usage is not None:
                answer["usage"] = counts(chunk.usage)
            for choice in chunk.choices:
                answer["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
                answer["content"] += choice.delta.content or ""
                answer["finish_reason"] = choice.finish_reason or answer["finish_reason"]
        return answer

    def whole(prompt: str) -> object:
        reply = ask(prompt)
        (choice,) = reply.choices
        reasoning = getattr(choice.message, "reasoning", None)
        return [choice.message.content, reasoning, choice.finish_reason, counts(reply.usage)]

    def logprobs(prompt: str) -> object:
        (choice,) = ask(prompt, logprobs=True, top_logprobs=2).choices
        return [token.token for token in choice.logprobs.content]

    def choices(prompt: str) -> object:
        reply = client.completions.create(
            model=model, prompt=prompt, n=2, seed=7, temperature=1.0, max_tokens=150
        )
        return [[choice.text, choice.finish_reason] for choice in reply.choices]

    def schema(prompt: str) -> object:
        response_format = {"type": "json_schema", "json_schema": {"name": "turns", "schema": SCHEMA}}
        reply = ask(prompt, response_format=response_format, max_tokens=MAX_TOKENS)
        return reply.choices[0].message.content

    def tool(prompt: str) -> object:
        return tool_calls(ask(prompt, **FORCED_TOOL))

    def response(prompt: str) -> object:
        return client.responses.create(model=model, input=prompt, temperature=0).output_text

    def response_events(prompt: str) -> object:
        stream = client.responses.create(model=model, input=prompt, temperature=0, stream=True)
        return "".join(each.delta for each in stream if each.type == "response.output_text.delta")

    def unknown_model() -> object:
        try:
            client.completions.create(model="another", prompt="a")
        except NotFoundError as error:
            return error.body
        raise AssertionError("a model that is not served answers")

    found: dict[str, Any] = {"models": lambda: [each.id for each in client.models.list()]}
    for number, prompt in enumerate(prompts):
        found[f"chat, streamed {number}"] = lambda prompt=prompt: streamed(prompt)
    for name, case in {
        "chat": whole,
        "log-probabilities": logprobs,
        "completion, n=2, seeded": choices,
        "JSON schema": schema,
        "tool": tool,
        "response": response,
        "response, streamed": response_events,
    }.items():
        found[name] = lambda case=case: case(prompts[0])
    found["unknown model"] = unknown_model
    return found


if __name__ == "__main__":
    main(cases)
