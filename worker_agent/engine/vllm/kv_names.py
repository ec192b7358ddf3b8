"""Content names of a request's KV blocks."""

from __future__ import annotations

from hashlib import blake2b

from vllm.v1.request import Request


def kv_names(request: Request, tokens: int, block_tokens: int) -> list[bytes]:
    """One name a block of the first `tokens` tokens' KV.

    A full block has vLLM's own hash, which stands for its tokens and all before them; the last one, if it is
    partial, a hash of the block before it and of its tokens so far.
    """
    full, rest = divmod(tokens, block_tokens)
    names = [bytes(block_hash) for block_hash in request.block_hashes[:full]]
    if rest:
        digest = blake2b(names[-1] if names else b"", digest_size=32)
        for token_id in request.all_token_ids[full * block_tokens : tokens]:
            digest.update(int(token_id).to_bytes(8, "little"))
        names.append(digest.digest())
    return names
