"""Convert protobuf messages to plain JSON: names as in the .proto, enums as lower-case words or null."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from google.protobuf.descriptor import EnumDescriptor as PurePythonEnum
from google.protobuf.message import Message

from tailrace.json_value import JsonValue as JsonValue

if TYPE_CHECKING:
    from google._upb._message import EnumDescriptor as CompiledEnum

    EnumDescriptor = PurePythonEnum | CompiledEnum


def to_plain(message: Message) -> dict[str, JsonValue]:
    """Convert a message with all its fields, set or not. 64-bit integers stay numbers, bytes become
    hexadecimal."""
    fields = message.DESCRIPTOR.fields
    return {field.name: _plain(getattr(message, field.name), field.enum_type) for field in fields}


def to_plain_list(messages: Iterable[Message]) -> list[JsonValue]:
    """Convert messages, in order."""
    return [to_plain(message) for message in messages]


@lru_cache(maxsize=1_024)
def enum_word(enum: EnumDescriptor, number: int) -> str | None:
    """Return `prefill` for `POOL_PREFILL`, None for `..._UNSPECIFIED`, the number for an unknown value."""
    value = enum.values_by_number.get(number)
    if value is None:
        return str(number)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    word = value.name.removeprefix(prefix).lower()
    return None if word == "unspecified" else word


def enum_words(enum: EnumDescriptor) -> dict[str, int]:
    """Return the words of an enum with their numbers, without the unspecified one."""
    pairs = ((enum_word(enum, value.number), value.number) for value in enum.values)
    return {word: number for word, number in pairs if word is not None}


def _plain(value: object, enum: EnumDescriptor | None) -> JsonValue:
    match value:
        case Message():
            return to_plain(value)
        case int() if enum is not None:
            return enum_word(enum, value)
        case str() | int() | float():
            return value
        case bytes():
            return value.hex()
        case Iterable():
            return [_plain(entry, enum) for entry in value]
    raise TypeError(f"no JSON for {type(value).__name__}")
