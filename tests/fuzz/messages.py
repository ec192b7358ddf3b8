"""Generate inputs: messages with random fields, damaged messages, and noise.

All randomness comes from a given generator, so that a seed reproduces an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_MAX_DEPTH: Final = 4
# In a repeated field.
_MAX_ELEMENTS: Final = 3
_LARGE_BYTES: Final = 100_000
_NOISE_BYTES: Final = 200

_TEXTS: Final = (
    "",
    "a",
    "\x00",
    "../../etc/passwd",
    "%s%n{}",
    "\u202e\U0001f600",
    "x" * _LARGE_BYTES,
    "127.0.0.1:1",
    "[::1]:99999",
    "nan",
)
_SIGNED: Final = (0, 1, -1, 2, 1_000, 2**31 - 1, -(2**31))
_LONG: Final = (*_SIGNED, 2**63 - 1, -(2**63))
_UNSIGNED: Final = (0, 1, 2, 1_000, 2**31, 2**32 - 1)
_UNSIGNED_LONG: Final = (*_UNSIGNED, 2**63, 2**64 - 1)
_REAL: Final = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e9,
    1e308,
    -1e308,
    5e-324,
    float("inf"),
    float("-inf"),
    float("nan"),
)
_FLOAT: Final = (0.0, 1.0, -1.0, 3.4e38, float("inf"), float("nan"))

_NUMBERS: Final[dict[int, Sequence[float]]] = {
    FieldDescriptor.CPPTYPE_INT32: _SIGNED,
    FieldDescriptor.CPPTYPE_INT64: _LONG,
    FieldDescriptor.CPPTYPE_UINT32: _UNSIGNED,
    FieldDescriptor.CPPTYPE_UINT64: _UNSIGNED_LONG,
    FieldDescriptor.CPPTYPE_DOUBLE: _REAL,
    FieldDescriptor.CPPTYPE_FLOAT: _FLOAT,
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
}


def random_message(random: Random, kind: Descriptor, names: Sequence[str], depth: int = 0) -> Message:
    """Return a message with random fields set. `names`: existing names in the cluster, for string fields."""
    message = GetMessageClass(kind)()
    # A field of a oneof replaces the one set before.
    for field in random.sample(list(kind.fields), random.randint(0, len(kind.fields))):
        if field.is_repeated:
            _fill(random, message, field, names, depth)
        elif field.message_type is None:
            setattr(message, field.name, _value(random, field, names))
        elif depth < _MAX_DEPTH:
            getattr(message, field.name).CopyFrom(
                random_message(random, field.message_type, names, depth + 1)
            )
    return message


def _fill(random: Random, message: Message, field: FieldDescriptor, names: Sequence[str], depth: int) -> None:
    elements = getattr(message, field.name)
    count = random.randint(0, _MAX_ELEMENTS)
    if field.message_type is None:
        elements.extend(_value(random, field, names) for _ in range(count))
    elif field.message_type.GetOptions().map_entry:
        _fill_map(random, elements, field.message_type, names, depth, count)
    elif depth < _MAX_DEPTH:
        elements.extend(random_message(random, field.message_type, names, depth + 1) for _ in range(count))


def _fill_map(
    random: Random,
    elements: dict[object, object],
    entry: Descriptor,
    names: Sequence[str],
    depth: int,
    count: int,
) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    for _ in range(count):
        name = _value(random, key, names)
        if value.message_type is None:
            elements[name] = _value(random, value, names)
        elif depth < _MAX_DEPTH:
            inner = elements[name]
            assert isinstance(inner, Message)
            inner.CopyFrom(random_message(random, value.message_type, names, depth + 1))


def _value(random: Random, field: FieldDescriptor, names: Sequence[str]) -> object:
    if field.enum_type is not None:
        # Including an unknown value.
        return random.choice([*field.enum_type.values_by_number, 77])
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return random.randbytes(random.choice((0, 1, 16, 32, 1_000)))
        return random.choice(names) if names and random.random() < 0.6 else random.choice(_TEXTS)
    return random.choice(_NUMBERS[field.cpp_type])


def damage(random: Random, data: bytes) -> bytes:
    """Return the data with a bit flipped, a piece removed, or truncated."""
    if not data:
        return noise(random)
    changed = bytearray(data)
    at = random.randrange(len(changed))
    match random.randrange(3):
        case 0:
            changed[at] ^= 1 << random.randrange(8)
        case 1:
            del changed[at : at + random.randint(1, 16)]
        case _:
            del changed[at:]
    return bytes(changed)


def noise(random: Random) -> bytes:
    """Return random bytes."""
    return random.randbytes(random.randint(1, _NOISE_BYTES))


def make_input(random: Random, kind: Descriptor, names: Sequence[str]) -> bytes:
    """Return an input of any kind; half of them are valid messages."""
    generators: Sequence[Callable[[], bytes]] = (
        lambda: random_message(random, kind, names).SerializeToString(),
        lambda: random_message(random, kind, names).SerializeToString(),
        lambda: damage(random, random_message(random, kind, names).SerializeToString()),
        lambda: noise(random),
    )
    return random.choice(generators)()
