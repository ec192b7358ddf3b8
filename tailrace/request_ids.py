"""Ids of requests: what a client may choose, and the short one by which the fleet knows the request.

A client's id (X-Request-Id, or request_id in a body) ends at the front end. Everything behind it - workers,
reports, spans, logs, `tailrace get requests` - has the id that `own_id` makes of it: vLLM's prefix, and a
digest in place of the client's text. So an operator finds a request by either id, and nobody has to remember
which belong together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final
from uuid import uuid4

MAX_BYTES: Final = 256
"""Longest id that a client may choose, encoded as UTF-8."""

_DIGEST_BYTES: Final = 8
# A name as vLLM makes it of a client's id: a prefix by route, and in some the number of the prompt.
_NAME: Final = re.compile(
    r"((?:\d{1,5}_)?(?:chatcmpl|cmpl|resp|msg|generate-tokens|embd|pooling|score|classify|generative-scoring|transcribe"
    r"|translate|tokenize)[-_])?(.+?)(-\d{1,5})?",
    re.DOTALL,
)
# Short, and harmless as it is: a random id as vLLM and proxies make them, or a digest.
_RANDOM: Final = re.compile(
    r"[0-9a-f]{8}|[0-9a-f]{16}|[0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
)
# A name as vLLM makes it of the id that an edge gave a request: random or a digest, and the ID of a key.
_AT_EDGE: Final = re.compile(rf"((?:chatcmpl|cmpl)-(?:{_RANDOM.pattern}))\.([0-9a-f]+)")
# What makes the id of each request another one, also if a client chooses the same again.
_UNIQUE: Final = re.compile(r"(.*)-[0-9a-f]{8}", re.DOTALL)


def problem_with(chosen: Iterable[tuple[str, str]]) -> str:
    """Return why a client may not choose the first unacceptable one of these ids; empty if it may choose all.

    `chosen`: what the client calls each, and the id.
    """
    for name, text in chosen:
        if len(text) > MAX_BYTES or len(text.encode(errors="surrogatepass")) > MAX_BYTES:
            return f"{name} must have at most {MAX_BYTES} bytes."
        if not text.isprintable():
            return f"{name} must consist of printable characters."
    return ""


def chosen_by_client(name: str) -> str:
    """Return the part of a name of vLLM's API server that a client may have chosen."""
    return _split(name)[1]


def own_id(name: str) -> str:
    """Return the fleet's id for a request of this name; another one each time."""
    return f"{_own_name(name)}-{uuid4().hex[:8]}"


def name_at_edge(chosen: str, key_id: str) -> str:
    """Return the id that an edge gives a request: by the client's id, or a random one if it chose none, and
    the ID of the key that it came with."""
    _, name, number = _split(chosen) if chosen else ("", uuid4().hex[:16], "")
    name += number
    return f"{name if _RANDOM.fullmatch(name) else _digest(name)}.{key_id}"


def read_name_at_edge(name: str) -> tuple[str, str]:
    """Return vLLM's name of a request without what an edge added, and the ID of its key; empty: it has no id
    that an edge gave it."""
    found = _AT_EDGE.fullmatch(name)
    return (name, "") if found is None else (found[1], found[2])


def is_own_id(request_id: str) -> bool:
    """Return whether an id has no text in it that a client chose, but for what looks like a random number."""
    unique = _UNIQUE.fullmatch(request_id)
    return unique is not None and _own_name(unique[1]) == unique[1]


def without_number(own: str) -> str:
    """Return an id of the fleet's without what is another one each time."""
    return own.rpartition("-")[0]


def matching(text: str, request_ids: Iterable[str]) -> list[str]:
    """Return which of the fleet's ids a user means by this text, in order.

    Those that contain it; else those of requests of which it is, or would be shown as, the client's own id.
    """
    known = sorted(request_ids)
    found = [request_id for request_id in known if text in request_id]
    if found:
        return found
    _, chosen, number = _split(text)
    parts = (_digest(chosen + number), f"{_digest(chosen)}{number}-")
    return [request_id for request_id in known if any(part in request_id for part in parts)]


def _split(name: str) -> tuple[str, str, str]:
    found = _NAME.fullmatch(name)
    return ("", name, "") if found is None else (found[1] or "", found[2], found[3] or "")


def _own_name(name: str) -> str:
    prefix, chosen, number = _split(name)
    return name if _RANDOM.fullmatch(chosen) else f"{prefix}{_digest(chosen)}{number}"


def _digest(chosen: str) -> str:
    return blake2b(chosen.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
