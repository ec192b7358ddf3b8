"""Large answers of /tokenize are sent part by part, and are the same as vLLM's."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from frontend_svc.api_server.large_lane import large_task

pytestmark = pytest.mark.vllm

TOKENS = 100_000


async def encoded(content: dict[str, Any]) -> tuple[bytes, int]:
    """Return the body that is sent for the content, and in how many parts."""
    from frontend_svc.api_server.token_lists import _response

    response = _response(content)
    if not hasattr(response, "body_iterator"):
        return bytes(response.body), 1
    parts = [part async for part in response.body_iterator]
    return b"".join(parts), len(parts)


@pytest.mark.parametrize("length", [0, 3, 1 << 15, (1 << 15) + 1, TOKENS])
@pytest.mark.parametrize("with_texts", [False, True])
async def test_answer_is_the_same_in_parts(length: int, with_texts: bool) -> None:
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeResponse

    from frontend_svc.api_server.token_lists import _answer

    fields = {
        "count": length,
        "max_model_len": 9,
        "tokens": list(range(length)),
        "token_strs": ['\u0120"\\\n'] * length if with_texts else None,
    }
    body, parts = await encoded(_answer(**fields).model_dump())
    assert json.loads(body) == TokenizeResponse(**fields).model_dump()
    assert (parts > 1) == (length > 1 << 15)


async def test_error_is_answered_as_by_vllm() -> None:
    body, _ = await encoded({"error": {"message": "no"}})
    assert json.loads(body) == {"error": {"message": "no"}}


async def test_texts_of_a_large_request_are_looked_up_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeCompletionRequest

    from frontend_svc.api_server import token_lists

    async def create(serving: object, request: TokenizeCompletionRequest, raw: object) -> object:
        assert not request.return_token_strs
        return token_lists._answer(count=2, max_model_len=9, tokens=[1, 2], token_strs=None)

    monkeypatch.setattr(token_lists, "_create_tokenize", create)
    threads: list[str] = []

    def convert(tokens: list[int]) -> list[str]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            threads.append("apart")
        return [str(token) for token in tokens]

    with ThreadPoolExecutor(1) as lane:
        tokenizer = SimpleNamespace(convert_ids_to_tokens=convert)
        renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer, _executor=lane)
        request = TokenizeCompletionRequest(prompt="x", return_token_strs=True)
        token = large_task.set(True)
        try:
            answer = await token_lists._create(SimpleNamespace(renderer=renderer), request, None)
        finally:
            large_task.reset(token)
    assert answer.token_strs == ["1", "2"] and threads == ["apart"]


def tokenizers() -> dict[str, Any]:
    """Return the tiny model's tokenizer, and one with special tokens around each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoTokenizer, TokenizersBackend

    from tailrace.tiny import MODEL_PATH

    words = {"[UNK]": 0, "[BOS]": 1, "[EOS]": 2, "a": 3, "é": 4, "🙂": 5}
    around = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    around.pre_tokenizer = pre_tokenizers.Whitespace()
    around.post_processor = processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
    )
    return {
        "tiny": AutoTokenizer.from_pretrained(str(MODEL_PATH)),
        "around": TokenizersBackend(tokenizer_object=around, bos_token="[BOS]", eos_token="[EOS]"),
        "left": TokenizersBackend(tokenizer_object=around, truncation_side="left"),
    }


@pytest.mark.parametrize("name", ["tiny", "around", "left"])
@pytest.mark.parametrize("max_length", [None, 1, 5, 50_000])
@pytest.mark.parametrize("special", [True, False])
def test_ids_of_a_large_text_are_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str, max_length: int | None, special: bool
) -> None:
    from transformers import TokenizersBackend
    from vllm.renderers.base import BaseRenderer

    from frontend_svc.api_server import token_lists

    tokenizer = tokenizers()[name]
    text = "a é 🙂 [EOS] b\n<|im_end|> " * 4_000
    kwargs = {"truncation": max_length is not None, "max_length": max_length, "add_special_tokens": special}
    params = SimpleNamespace(get_encode_kwargs=lambda: kwargs)
    renderer = SimpleNamespace(
        get_tokenizer=lambda: tokenizer,
        _wants_offsets=lambda *_: False,
        _build_tokens_prompt=BaseRenderer._build_tokens_prompt,
    )
    expected = tokenizer(text, **kwargs)["input_ids"]
    # To be restored after the test.
    monkeypatch.setattr(BaseRenderer, "_tokenize_prompt", BaseRenderer._tokenize_prompt)
    monkeypatch.setattr(TokenizersBackend, "_encode_plus", TokenizersBackend._encode_plus)
    token_lists.use_ids_alone()
    slow: list[str] = []

    def encode_plus(self: object, text: str, **options: Any) -> object:
        slow.append(text)
        return original(self, text=text, **options)

    original = token_lists._encode_plus
    monkeypatch.setattr(token_lists, "_encode_plus", encode_plus)
    prompt = token_lists._tokenize(renderer, {"prompt": text}, params)
    assert prompt == {"prompt_token_ids": expected, "prompt": text}
    assert slow == [""]
    # A short text, and one whose offsets are asked for, are tokenized as before.
    assert token_lists._tokenize(renderer, {"prompt": "a"}, params)["prompt_token_ids"]
    assert tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    assert slow == ["", "a", text]
