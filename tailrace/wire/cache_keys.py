"""Everything that names a request's KV blocks, read from vLLM's EngineCoreRequest: its tokens and extra
keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tailrace.cache.names import NO_KEYS, Image, Keys
from tailrace.wire.requests import Frames, RequestFields


class _Place(msgspec.Struct, gc=False):
    offset: int
    length: int


class _Feature(msgspec.Struct, gc=False):
    identifier: str
    mm_position: _Place


class _Adapter(msgspec.Struct, array_like=True, gc=False):
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


_Head = RequestFields[msgspec.Raw, list[_Feature] | None, msgspec.Raw, _Adapter | None]
_heads = msgspec.msgpack.Decoder(_Head)
_token_ids = msgspec.msgpack.Decoder(list[int] | None)
_NIL = b"\xc0"


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """What names the KV blocks of one request. `session_id` is empty if the client named no session."""

    keys: Keys
    session_id: str
    # Undecoded; empty: a prompt of embeddings, whose blocks cannot be named here.
    _prompt: bytes

    def tokens(self) -> Sequence[int]:
        """Return the prompt's tokens. Decoding them is most of the work. Raise msgspec.DecodeError."""
        return (_token_ids.decode(self._prompt) or ()) if self._prompt else ()


def read_cache_keys(frames: Frames) -> CacheKeys | None:
    """Read the keys from an ADD's data frames; return None if the message is malformed."""
    if not frames:
        return None
    try:
        head = _heads.decode(frames[0])
    except msgspec.DecodeError:
        return None
    embedded = bytes(memoryview(head.prompt_embeds)[:1]) != _NIL
    return CacheKeys(
        keys=_keys(head),
        session_id=head.session_id or "",
        _prompt=b"" if embedded else bytes(head.prompt_token_ids),
    )


def _keys(head: _Head) -> Keys:
    adapter = head.lora_request
    if not head.mm_features and adapter is None and not head.cache_salt:
        return NO_KEYS
    images = [Image(f.identifier, f.mm_position.offset, f.mm_position.length) for f in head.mm_features or ()]
    return Keys(
        adapter=None if adapter is None else (adapter.lora_name, adapter.lora_path),
        images=sorted(images, key=lambda image: image.offset),
        salt=head.cache_salt,
    )
