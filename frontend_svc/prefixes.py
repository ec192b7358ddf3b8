"""What a scheduler is told of a request's prefix: names of its blocks, never its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from frontend_svc.streams import Stream
from tailrace.cache.names import Naming, block_names
from tailrace.records import InstanceRecord
from tailrace.wire.cache_keys import read_cache_keys


@dataclass(frozen=True, slots=True)
class Prefix:
    """`names` is empty where no instance names its blocks; each name stands for `block_tokens` tokens."""

    names: Sequence[int] = ()
    block_tokens: int = 0
    session_id: str = ""


def common_naming(records: Iterable[InstanceRecord]) -> Naming | None:
    """How most of these instances name their blocks; None: none of them tells."""
    namings = Counter(record.block_naming for record in records if record.block_naming is not None)
    return max(namings, key=lambda naming: (namings[naming], repr(naming)), default=None)


def prefix_of(stream: Stream, naming: Naming | None) -> Prefix:
    """Of the prompt and what has been accepted since."""
    read = read_cache_keys(stream.frames)
    if read is None:
        return Prefix()
    if naming is None:
        return Prefix(session_id=read.session_id)
    try:
        tokens = read.tokens()
    except msgspec.DecodeError:
        return Prefix(session_id=read.session_id)
    if stream.accepted:
        tokens = [*tokens, *stream.token_ids]
    return Prefix(block_names(tokens, naming, read.keys), naming.block_tokens, read.session_id)
