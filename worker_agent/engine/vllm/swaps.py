"""KV copies between the device and host memory: what the connector's scheduler side sends its worker side,
and the names of the blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Swap:
    """A copy of blocks between the device and host memory: entry i of each list describes one block."""

    block_ids: list[int]
    slots: list[int]
    # See kv_names; from the tokens that the scheduler knows now.
    names: list[bytes]


@dataclass(frozen=True, slots=True)
class Load:
    """A copy of prompt blocks to the device while the request waits and steps for other requests continue."""

    request_id: str
    swap: Swap


@dataclass(slots=True)
class SwapMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The copies of one step. `swap_outs` run first, in order, then `swap_ins`, which complete before the
    forward pass; `loads` are started last and complete in later steps."""

    swap_outs: list[Swap] = field(default_factory=list)
    swap_ins: list[Swap] = field(default_factory=list)
    # Requests that read KV loaded in this step.
    swapped_in: set[str] = field(default_factory=set)
    loads: list[Load] = field(default_factory=list)


def kv_names(request: Request, tokens: int, block_tokens: int) -> list[bytes]:
    """Return the name of each block that holds KV of the first `tokens` tokens.

    A full block's name is vLLM's hash of its tokens and all before them. The name of a partial last block is
    a hash of the previous block's name and its own tokens so far.
    """
    full, rest = divmod(tokens, block_tokens)
    names = [bytes(block_hash) for block_hash in request.block_hashes[:full]]
    if rest:
        digest = blake2b(names[-1] if names else b"", digest_size=32)
        for token_id in request.all_token_ids[full * block_tokens : tokens]:
            digest.update(int(token_id).to_bytes(8, "little"))
        names.append(digest.digest())
    return names
