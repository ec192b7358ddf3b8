"""Content names of a request's KV blocks."""

from __future__ import annotations

from hashlib import blake2b

from vllm.v1.request import Request


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
