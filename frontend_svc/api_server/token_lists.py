"""Tokenize large texts, and answer large requests to vLLM's `/tokenize`, without holding the event loop.

A megabyte of text has up to a million tokens. vLLM copies and checks the list twice, looks up the tokens'
texts, and encodes all of it as JSON, on the event loop: a tenth of a second in which no stream gets a token.
Here long lists are not checked again, texts are looked up in the thread of large requests, and the answer is
encoded part by part while it is sent.

vLLM uses a text's ids alone, but its tokenizer also finds where each token stands in the text, and makes
lists of attention masks and types. Of a large text it makes the ids alone here: a megabyte takes a fourth of
the time, and holds Python's lock for a third of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers import BatchEncoding, TokenizersBackend
from vllm.entrypoints.serve.tokenize import api_router, serving
from vllm.entrypoints.serve.tokenize.protocol import TokenizeRequest, TokenizeResponse
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.renderers.base import BaseRenderer
from vllm.renderers.params import TokenizeParams

from frontend_svc.api_server.large_lane import LARGE_BYTES, large_task

# Tokens that are encoded at once: it takes less than a millisecond.
_PART: Final = 1 << 15
_LISTS: Final = ("tokens", "token_strs")


class _LongAnswer(TokenizeResponse):  # type: ignore[misc]
    """An answer whose lists are vLLM's own, neither checked nor copied."""

    def model_dump(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the fields; see BaseModel."""
        return {name: getattr(self, name) for name in TokenizeResponse.model_fields}


def _answer(**fields: Any) -> TokenizeResponse:
    """Take the place of TokenizeResponse in vLLM's module."""
    long = len(fields["tokens"]) > _PART
    return _LongAnswer.model_construct(**fields) if long else TokenizeResponse(**fields)


def _response(content: dict[str, Any], status_code: int = 200) -> Response:
    """Take the place of JSONResponse in vLLM's module."""
    if len(content.get("tokens") or ()) <= _PART:
        return JSONResponse(content=content, status_code=status_code)
    return StreamingResponse(_parts(content), status_code, media_type="application/json")


async def _parts(content: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield an object as JSON, its long lists in parts."""
    for number, (name, value) in enumerate(content.items()):
        yield (b"," if number else b"{") + msgspec.json.encode(name) + b":"
        if name in _LISTS and isinstance(value, list):
            yield b"["
            for start in range(0, len(value), _PART):
                part = msgspec.json.encode(value[start : start + _PART])[1:-1]
                yield b"," + part if start else part
                await asyncio.sleep(0)
            yield b"]"
        else:
            yield msgspec.json.encode(value)
    yield b"}"


_create_tokenize = ServingTokenization.create_tokenize


async def _create(self: ServingTokenization, request: TokenizeRequest, *args: Any) -> Any:
    """Take the place of ServingTokenization.create_tokenize: look up the texts of tokens in a thread."""
    if not (request.return_token_strs and large_task.get()):
        return await _create_tokenize(self, request, *args)
    request.return_token_strs = False
    answer = await _create_tokenize(self, request, *args)
    if isinstance(answer, TokenizeResponse):
        convert = self.renderer.get_tokenizer().convert_ids_to_tokens
        lane = self.renderer._executor
        answer.token_strs = await asyncio.get_running_loop().run_in_executor(lane, convert, answer.tokens)
    return answer


_tokenize_prompt = BaseRenderer._tokenize_prompt
_encode_plus = TokenizersBackend._encode_plus
# Asking for neither is what tells `_encode` that ids are enough.
_IDS_ALONE: Final = {"return_attention_mask": False, "return_token_type_ids": False}
# With any of these, more than ids.
_MORE: Final = (
    "text_pair",
    "is_split_into_words",
    "return_tensors",
    "return_overflowing_tokens",
    "return_special_tokens_mask",
    "return_offsets_mapping",
    "return_length",
)


def _tokenize(self: BaseRenderer, prompt: TextPrompt, params: TokenizeParams) -> TokensPrompt:
    """Take the place of BaseRenderer._tokenize_prompt."""
    text, tokenizer = prompt["prompt"], self.get_tokenizer()
    fast = isinstance(tokenizer, TokenizersBackend) and len(text) > LARGE_BYTES
    if not fast or self._wants_offsets(prompt, params):
        return _tokenize_prompt(self, prompt, params)
    encoding = tokenizer(text, **params.get_encode_kwargs(), **_IDS_ALONE)
    return TokensPrompt(prompt_token_ids=encoding["input_ids"], **prompt)


def _encode(self: TokenizersBackend, text: Any, **options: Any) -> BatchEncoding:
    """Take the place of TokenizersBackend._encode_plus: do not compute what is not asked for."""
    asked_alone = all(options.get(name) is False for name in _IDS_ALONE)
    if not (asked_alone and isinstance(text, str)) or any(options.get(name) for name in _MORE):
        return _encode_plus(self, text=text, **options)
    # Sets what applies to the next call, truncation for one.
    _encode_plus(self, text="", **options)
    special = options.get("add_special_tokens", True)
    (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
    return BatchEncoding({"input_ids": encoding.ids})


def use_ids_alone() -> None:
    """Replace how vLLM tokenizes large texts. Call this before a renderer is made."""
    BaseRenderer._tokenize_prompt = _tokenize
    TokenizersBackend._encode_plus = _encode


def answer_in_parts() -> None:
    """Replace what vLLM's route uses."""
    serving.TokenizeResponse = _answer
    api_router.JSONResponse = _response
    ServingTokenization.create_tokenize = _create
