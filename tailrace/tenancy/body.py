"""Judge a request's body before anything is done with it. Pure.

vLLM parses JSON of any depth, and accepts what cannot be encoded (a lone surrogate, an integer of more than
64 bits), which fails only when the request is sent to the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

import msgspec
import numpy as np

from tailrace.tenancy.demand import Demand, NotAnObject, demand_of
from tailrace.tenancy.meter import LimitExceeded

MAX_NESTING: Final = 100
"""Deepest nesting of a body. Deeper values overflow the stack somewhere: templates, schemas, copies."""
DEFAULT_MAX_TEXT_BYTES: Final = 1 << 20
"""Bytes of text that a request may have without a setting, or more if the model's context is longer."""
# English takes 4 to 5, and escaped in JSON others take more.
_TEXT_BYTES_PER_TOKEN: Final = 16
# Bodies' worth of text that a query with its documents may come to: a query of 8,192 tokens with a thousand
# documents is tokenized as 32 MiB.
_REPEATS: Final = 64
MAX_BAD_WORDS_BYTES: Final = 8 << 10
"""Bytes of `bad_words` as sent: vLLM takes 1,024 tokens of them, but counts them when it has them."""
URLENCODED: Final = "application/x-www-form-urlencoded"
"""Content type of a form without files."""
LARGE_BODY_BYTES: Final = 1 << 18
"""A larger body is checked in a thread, block by block, and a field of it is not looked for."""

# By byte: what it adds to the level of nesting.
_LEVELS: Final = np.zeros(256, np.int8)
_LEVELS[[*b"[{"]], _LEVELS[[*b"]}"]] = 1, -1
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")
_LONE_SURROGATE: Final = "has a lone surrogate (half of a UTF-16 pair), which is not valid Unicode."
# Perhaps an integer that MessagePack has no type for, which has those of _INTEGERS.
_MANY_DIGITS: Final = re.compile(rb"[\s:\[,](?:\d{20}|-\d{19})")
_INTEGERS: Final = range(-(1 << 63), 1 << 64)
# Beginnings of fields whose numbers vLLM turns into text; those of other schemas it sends as they are.
_AS_TEXT: Final = ("messages[", "tools[")
# A field's name in an error message.
_SHOWN_MAX: Final = 60


class LimitRefusal(Exception):
    """A limit refuses the request. `retry_after_s`: 0 if trying again is of no use."""

    def __init__(self, status: HTTPStatus, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """Return the type of OpenAI's error object."""
        return _KINDS.get(self.status, "BadRequestError")

    @property
    def headers(self) -> dict[str, str]:
        """Return the header that says when to try again, if it is of use."""
        return {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}


_KINDS: Final = {
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}


def refuse(exceeded: LimitExceeded | None) -> None:
    """Raise LimitRefusal if a limit of a tenant is exceeded."""
    if exceeded is not None:
        status = HTTPStatus.TOO_MANY_REQUESTS if exceeded.retry_after_s else HTTPStatus.BAD_REQUEST
        raise LimitRefusal(status, f"Limit exceeded: {exceeded.reason}.", exceeded.retry_after_s)


def is_form(kind: str) -> bool:
    """Return whether a body of this content type (lower case, without parameters) is a form, which may have
    files in it."""
    # One that ends in +json is JSON, for both API servers.
    return kind.startswith("multipart/") or kind == URLENCODED


def max_text_bytes_of(context_tokens: int) -> int:
    """Return how many bytes of text a request to a model with this context may have without a setting."""
    return max(DEFAULT_MAX_TEXT_BYTES, _TEXT_BYTES_PER_TOKEN * context_tokens)


def judge(
    body: bytes, max_text_bytes: int, max_messages: int, max_sequences: int, takes_media: bool = True
) -> Demand:
    """Return what a JSON body asks for. Raise LimitRefusal if it is too much, or no JSON object.

    Of sequences, no more are counted than are allowed, and one: who counts them refuses these.
    """

    def too_much_text(size: int) -> LimitRefusal:
        besides = " besides images and other media" if takes_media else ""
        message = f"A request's body may have at most {max_text_bytes} bytes{besides}, not {size}."
        return LimitRefusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)

    if body.count(b",") > max_text_bytes:
        # Media have none to speak of. To read so many values takes long.
        raise too_much_text(len(body))
    try:
        demand = demand_of(body, max_messages, max_sequences)
    except NotAnObject:
        if len(body) > max_text_bytes:
            raise too_much_text(len(body)) from None
        message = problem_with_body(body) or "The body is not a valid JSON object."
        raise LimitRefusal(HTTPStatus.BAD_REQUEST, message) from None
    if demand.text_bytes > max_text_bytes:
        raise too_much_text(demand.text_bytes)
    if demand.repeated_bytes > _REPEATS * max_text_bytes:
        most = f"at most {_REPEATS * max_text_bytes} bytes, not {demand.repeated_bytes}"
        message = f"A request's query, once for each of its documents, may have {most}."
        raise LimitRefusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
    if demand.messages > max_messages:
        message = f"A request may have at most {max_messages} messages, content parts and tools."
        raise LimitRefusal(HTTPStatus.BAD_REQUEST, message)
    if not demand.has_outputs_object:
        # vLLM's validator raises something else than a refusal.
        raise LimitRefusal(HTTPStatus.BAD_REQUEST, "structured_outputs must be an object.")
    if demand.bad_words_bytes > MAX_BAD_WORDS_BYTES:
        message = f"bad_words may have at most {MAX_BAD_WORDS_BYTES} bytes."
        raise LimitRefusal(HTTPStatus.BAD_REQUEST, message)
    return demand


def too_many_sequences(most: int) -> LimitRefusal:
    """Return the refusal of a request for more sequences than these."""
    message = f"A request may have at most {most} sequences (prompts times n, or queries and documents)."
    return LimitRefusal(HTTPStatus.BAD_REQUEST, message)


def problem_with_body(body: bytes) -> str:
    """Return why a body is refused; empty if it is not. What is no JSON at all is left to vLLM."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            return f"The body is not UTF-8: {error.reason} at byte {error.start}."
    if body.startswith(_BYTE_ORDER_MARK):
        return "The body begins with a byte order mark, which JSON may not have: send it without."
    # Python's parser takes UTF-16 and UTF-32 as well, whose ASCII characters have null bytes.
    if b"\0" in body:
        return "The body is not UTF-8: it has null bytes."
    if body.count(b"[") + body.count(b"{") > MAX_NESTING and _is_deep(body):
        return f"The body is nested more than {MAX_NESTING} levels deep."
    if len(body) <= LARGE_BODY_BYTES and _MANY_DIGITS.search(body) and (where := _long_integer(body)):
        return f"{where} is an integer of more than 64 bits."
    if b"\\u" not in body:
        return ""
    try:
        # Strict, and fast.
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError:
        if len(body) > LARGE_BODY_BYTES:
            return f"The body is not JSON, or it {_LONE_SURROGATE}"
        where = _lone_surrogate(body)
        return f"{where} {_LONE_SURROGATE}" if where else ""
    return ""


def _is_deep(body: bytes) -> bool:
    text = np.frombuffer(body, np.uint8)
    level, in_string, backslashes = 0, 0, 0
    for start in range(0, len(text), LARGE_BODY_BYTES):
        block = text[start : start + LARGE_BODY_BYTES]
        # How many backslashes end at each byte; an odd number escapes the next one.
        at = np.arange(1, len(block) + 1, dtype=np.int32)
        others = np.maximum.accumulate(np.where(block == _BACKSLASH, -backslashes, at))
        runs = np.concatenate(([backslashes], at - others))
        backslashes = int(runs[-1])
        quotes = np.cumsum((block == _QUOTE) & (runs[:-1] & 1 == 0), dtype=np.int32) + in_string
        in_string = int(quotes[-1]) & 1
        levels = np.cumsum(np.where(quotes & 1, 0, _LEVELS[block]), dtype=np.int32) + level
        if levels.max() > MAX_NESTING:
            return True
        level = int(levels[-1])
    return False


def _lone_surrogate(body: bytes) -> str:
    """Return the first field that has one; empty if none has, or the body is not JSON."""
    found = (path for path, value in _scalars(body) if isinstance(value, str) and not _is_encodable(value))
    return next(found, "")


def _long_integer(body: bytes) -> str:
    """Return the first field that is one of more than 64 bits; empty if none is, or the body is not JSON."""
    numbers = (path for path, value in _scalars(body) if isinstance(value, int) and value not in _INTEGERS)
    return next((path for path in numbers if not path.startswith(_AS_TEXT)), "")


def _scalars(body: bytes) -> Iterator[tuple[str, object]]:
    """Yield each string, number and constant with the path of its field; the names of fields, too. None if
    the body is not JSON."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return
    yield from _inside(parsed, "")


def _inside(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, list):
        for number, element in enumerate(value):
            yield from _inside(element, f"{path}[{number}]")
    elif isinstance(value, dict):
        for name, element in value.items():
            shown = ascii(name)[1:-1][:_SHOWN_MAX]
            inside = f"{path}.{shown}" if path else shown
            yield inside, name
            yield from _inside(element, inside)
    else:
        yield path or "The body", value


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
