"""Generate what may be in etcd instead of a record of this version.

All randomness comes from a given generator, so that a seed reproduces an input.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final

from tailrace.store.reading import VALUE_BYTES
from tests.fuzz.messages import damage, noise

_HUGE_BYTES: Final = VALUE_BYTES + 1
_DEEP: Final = 50_000
_STRANGE: Final[tuple[object, ...]] = (
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**64,
    10**400,
    0.5,
    -0.0,
    1e308,
    5e-324,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    "a",
    "\x00",
    "\u001b[31m",
    "\u202e\U0001f600",
    "\ud800",
    "../../etc/passwd",
    "%s%n{}",
    "[::1]:99999",
    "127.0.0.1:1",
    "nan",
    "x" * 5_000,
    [],
    [[]],
    {},
    {"": None},
    ["a", 1, None],
)
_NOT_JSON: Final = (
    b"",
    b"null",
    b"1e999",
    b"-0",
    b"{",
    b"[]",
    b"{}",
    b'"',
    b"\xff\xfe",
    b"[" * _DEEP,
    b'{"a":' * _DEEP,
)
# Stands for bytes that are not UTF-8, which JSON's writer would refuse.
_NOT_UTF8: Final = "not UTF-8"


class Way(enum.StrEnum):
    """How an input differs from the record that this version would write."""

    NOISE = "random bytes"
    DAMAGED = "damaged"
    WRONG = "wrong structure"
    LATER = "later version"


def record_input(random: Random, way: Way, valid: bytes) -> bytes:
    """Return a value to write in place of a valid one."""
    match way:
        case Way.NOISE:
            return random.choice(_NOT_JSON) if random.random() < 0.3 else noise(random)
        case Way.DAMAGED:
            return damage(random, valid)
        case Way.WRONG:
            return _changed(random, valid, _replace)
        case Way.LATER:
            return _changed(random, valid, _add)


def _changed(random: Random, valid: bytes, change: Callable[[Random, Any, Any], None]) -> bytes:
    """Return a valid value, changed in one to three places."""
    if random.random() < 0.02:
        return valid + b" " * _HUGE_BYTES
    try:
        record = {"": json.loads(valid)}
    except ValueError:
        # A name without structure.
        record = {"": valid.decode()}
    for _ in range(random.randint(1, 3)):
        holder, name = random.choice([*_places(record)])
        change(random, holder, name)
    text = json.dumps(record[""]) if not isinstance(record[""], str) else record[""]
    return text.encode(errors="surrogatepass").replace(_NOT_UTF8.encode(), b"\xc3\x28")


def _replace(random: Random, holder: Any, name: Any) -> None:
    """Give a place a value of another type or range, or nothing at all."""
    if name and isinstance(holder, dict) and random.random() < 0.1:
        del holder[name]
    else:
        holder[name] = random.choice([*_STRANGE, _NOT_UTF8])


def _add(random: Random, holder: Any, name: Any) -> None:
    """Give an object a field, a list an element, and a word an ending that this version does not know."""
    found = holder[name]
    if isinstance(found, dict):
        found["of_a_later_version"] = random.choice(_STRANGE)
    elif isinstance(found, list):
        found.append(random.choice([*_STRANGE, *found]))
    elif isinstance(found, str):
        holder[name] = f"{found}-of-a-later-version"


def _places(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield every place in nested lists and objects, as (container, key)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in list(items):
        yield value, name
        yield from _places(inner)
