"""What a request's body asks for, read from its bytes before vLLM parses it.

Read with msgspec, which skips what does not matter here: a megabyte takes a third of a millisecond. What it
cannot read as a JSON object is nothing that vLLM's routes accept, except numbers such as NaN, which are not
JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec

# Types of content parts whose text is not tokenized: vLLM's, OpenAI's and Anthropic's.
_MEDIA_TYPES: Final = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "image",
        "image_embeds",
        "image_url",
        "input_audio",
        "input_image",
        "prompt_embeds",
        "video_embeds",
        "video_url",
    }
)
# By what vLLM tells the type of a part that does not name it.
_MEDIA_KEYS: Final = ("audio_url", "image_url", "input_audio", "video_url")
_NOTHING: Final = msgspec.Raw(b"")
# A list of anything but numbers and constants.
_LIST: Final = re.compile(rb"\[\s*[\"\[{]")
# Python reads no integers of more digits.
_DIGITS_MAX: Final = 4_300
# More of anything is refused anyway.
_NUMBER_MAX: Final = 1 << 31
# Rough seconds of the event loop in vLLM's parsing, validation and rendering, per byte, comma, object in a
# list, and message; measured with 4 MiB of text, of token ids, 60,000 search results, and 30,000 messages.
_BYTE_S, _COMMA_S, _OBJECT_S, _ITEM_S = 2e-9, 5e-8, 5e-6, 2e-5
# How an object in a list begins, without spaces. Text has no quotes without a backslash.
_LISTED_OBJECTS: Final = (b',{"', b'[{"', b",{}", b"[{}")
# Fewer cost too little to be counted.
_FEW_OBJECTS: Final = 200
# So many bytes before and after its brace tell whether an object is in a list.
_NEXT_TO_BRACE: Final = 128
_SPACES: Final = b" \t\r\n"
SEQUENCE_LOOP_S: Final = 2e-4
"""Seconds of the event loop that submitting one sequence to the engine takes, roughly."""


class NotAnObject(Exception):
    """The body is not a JSON object."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The amounts that limits count."""

    model: str | None = None
    # Bytes as sent, without images and other media.
    text_bytes: int = 0
    # Bytes of a query for each of its documents but one: vLLM tokenizes it with each.
    repeated_bytes: int = 0
    # Messages of a chat, content parts of them and of the system prompt, and tools; of more than are allowed,
    # one more than that.
    messages: int = 0
    # Prompts, inputs, or queries and documents (counted likewise), times the answers to each.
    sequences: int = 1
    # Whether images or other media are among its content, or tensors.
    media: bool = False
    # Whether it may be a beam search, which submits a prompt for each token of each sequence.
    beams: bool = False
    # Bytes of `bad_words` as sent, which vLLM tokenizes on the event loop.
    bad_words_bytes: int = 0
    # Whether `structured_outputs` is an object, null or absent.
    has_outputs_object: bool = True
    # Estimated seconds for which it occupies the event loop, before anything is generated.
    loop_s: float = 0.0

    @property
    def tokenized_bytes(self) -> int:
        """Return how many bytes of text vLLM tokenizes."""
        return self.text_bytes + self.repeated_bytes


class _Fields(msgspec.Struct):
    model: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    prompt_embeds: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    # Of Anthropic's API.
    system: msgspec.Raw = _NOTHING
    # Of Cohere's.
    texts: msgspec.Raw = _NOTHING
    images: msgspec.Raw = _NOTHING
    inputs: msgspec.Raw = _NOTHING
    # Of routes that score documents by queries. In a chat, documents are for the template.
    query: msgspec.Raw = _NOTHING
    queries: msgspec.Raw = _NOTHING
    data_1: msgspec.Raw = _NOTHING
    text_1: msgspec.Raw = _NOTHING
    documents: msgspec.Raw = _NOTHING
    items: msgspec.Raw = _NOTHING
    data_2: msgspec.Raw = _NOTHING
    text_2: msgspec.Raw = _NOTHING
    bad_words: msgspec.Raw = _NOTHING
    structured_outputs: msgspec.Raw = _NOTHING
    n: msgspec.Raw = _NOTHING
    best_of: msgspec.Raw = _NOTHING
    use_beam_search: msgspec.Raw = _NOTHING


class _Message(msgspec.Struct):
    content: msgspec.Raw = _NOTHING


class _Part(msgspec.Struct):
    type: msgspec.Raw = _NOTHING
    text: msgspec.Raw = _NOTHING
    audio_url: msgspec.Raw = _NOTHING
    image_url: msgspec.Raw = _NOTHING
    input_audio: msgspec.Raw = _NOTHING
    video_url: msgspec.Raw = _NOTHING


_fields = msgspec.json.Decoder(_Fields)
_list = msgspec.json.Decoder(list[msgspec.Raw])
_message = msgspec.json.Decoder(_Message)
_part = msgspec.json.Decoder(_Part)
_any = msgspec.json.Decoder()


def demand_of(body: bytes, max_messages: int, max_sequences: int) -> Demand:
    """Return what the body asks for. Raise NotAnObject.

    Reads no more items of a list than are allowed: each costs far more than the bytes that it takes.
    """
    try:
        fields = _fields.decode(body)
        messages, chats = _items(fields.messages, max_messages), 0
        if messages and _first(messages[0]) == b"[":
            # A batch of chats.
            chats, batch = len(messages), messages
            messages = []
            for chat in batch:
                messages += _items(chat, max_messages)
                if len(messages) > max_messages:
                    break
        inputs, texts = _items(fields.input, max(max_messages, max_sequences)), 0
        if inputs and _first(inputs[0]) != b"{":
            # Of /v1/embeddings, texts or lists of token ids; of /v1/responses, messages.
            inputs, texts = [], len(inputs)
        said = [*messages, *inputs]
        counted = len(said) + sum(len(_items(raw, max_messages)) for raw in (fields.tools, fields.system))
        # Tensors, as media are.
        media_bytes = len(bytes(fields.prompt_embeds))
        if counted <= max_messages:
            parts, part_bytes = _content(said, max_messages - counted)
            counted += parts
            media_bytes += part_bytes
        lists = (fields.prompt, fields.prompt_embeds, fields.texts, fields.images, fields.inputs)
        prompts = sum(len(_items(raw, max_sequences)) for raw in lists)
        pairs, repeated_bytes = _scored(fields, max_sequences)
        prompts += texts + chats + pairs
        answers = max(_number(fields.n), _number(fields.best_of))
        model = _scalar(fields.model)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotAnObject(str(error)) from error
    sequences = max(1, prompts) * answers
    commas = body.count(b",")
    objects = _listed_objects(body) if commas > _FEW_OBJECTS else 0
    loop_s = len(body) * _BYTE_S + commas * _COMMA_S + objects * _OBJECT_S
    loop_s += counted * _ITEM_S + sequences * SEQUENCE_LOOP_S
    return Demand(
        model if isinstance(model, str) else None,
        len(body) - media_bytes,
        repeated_bytes,
        min(counted, max_messages + 1),
        sequences,
        media_bytes > 0,
        bytes(fields.use_beam_search) not in (b"", b"false", b"null"),
        len(bytes(fields.bad_words)),
        bytes(fields.structured_outputs)[:1] in (b"", b"{", b"n"),
        loop_s,
    )


def _scored(fields: _Fields, most: int) -> tuple[int, int]:
    """Return the number of queries and documents, of each `most` + 1 if there are more, and the bytes of a
    query's text beyond those that are sent: it is scored with each document. (0, 0) without a query."""
    queries = [raw for raw in (fields.query, fields.queries, fields.data_1, fields.text_1) if bytes(raw)]
    if not queries:
        return 0, 0
    # Several queries have a document each.
    several = [len(_items(raw, most)) for raw in queries]
    documents = sum(
        len(_items(raw, most)) for raw in (fields.documents, fields.items, fields.data_2, fields.text_2)
    )
    single_bytes = sum(
        len(bytes(raw)) - _content(_items(raw, most) or [raw], most)[1]
        for raw, count in zip(queries, several, strict=True)
        if count <= 1
    )
    return sum(several) + documents, single_bytes * max(0, documents - 1)


def _listed_objects(body: bytes) -> int:
    """Return how many objects in lists the body has, if there may be many."""
    braces = body.count(b"{")
    if braces <= _FEW_OBJECTS:
        return 0
    if len(body) > 2 * _NEXT_TO_BRACE * braces:
        # Mostly images, say, which take long to go through byte by byte.
        body = b"{".join(part[:_NEXT_TO_BRACE] + part[-_NEXT_TO_BRACE:] for part in body.split(b"{"))
    dense = body.translate(None, _SPACES)
    return sum(map(dense.count, _LISTED_OBJECTS))


def _content(said: list[msgspec.Raw], most: int) -> tuple[int, int]:
    """Return the number of content parts of these messages, and the bytes of those that are media.

    Stop after `most` parts.
    """
    count = media_bytes = 0
    for message in said:
        if _first(message) != b"{":
            continue
        for raw in _items(_message.decode(message).content, most):
            count += 1
            if count > most:
                return count, media_bytes
            if _first(raw) != b"{":
                continue
            part = _part.decode(raw)
            if bytes(part.type) in (b"", b"null"):
                is_media = any(bytes(getattr(part, key)) for key in _MEDIA_KEYS)
            else:
                is_media = _scalar(part.type) in _MEDIA_TYPES
            if is_media:
                media_bytes += len(bytes(raw)) - len(bytes(part.text))
    return count, media_bytes


def _first(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def _items(raw: msgspec.Raw, most: int) -> list[msgspec.Raw]:
    """Return the items of a list, `most` + 1 if there are more; none of a list of token ids or of another
    value."""
    if _LIST.match(raw) is None:
        return []
    if bytes(raw).count(b",") < most:
        return _list.decode(raw)
    # Its commas may be those of texts.
    try:
        return [item for item in msgspec.structs.astuple(_at_most(most).decode(raw)) if item is not _NOTHING]
    except msgspec.ValidationError:
        return [_NOTHING] * (most + 1)


@cache
def _at_most(items: int) -> msgspec.json.Decoder[Any]:
    """Return a decoder of lists that stops with ValidationError at one item more."""
    fields = [(f"item_{number}", msgspec.Raw, _NOTHING) for number in range(items)]
    return msgspec.json.Decoder(
        msgspec.defstruct("Items", fields, array_like=True, forbid_unknown_fields=True)
    )


def _scalar(raw: msgspec.Raw) -> object:
    """Return a value; None for a list or an object."""
    return None if _first(raw) in (b"", b"[", b"{") else _any.decode(raw)


def _number(raw: msgspec.Raw) -> int:
    """Return a positive number; 1 for anything else, which vLLM refuses. Pydantic takes strings, too."""
    if len(bytes(raw)) > _DIGITS_MAX:
        return 1
    value = _scalar(raw)
    try:
        return max(1, min(int(float(value)), _NUMBER_MAX)) if isinstance(value, int | float | str) else 1
    except (ValueError, OverflowError):
        return 1
