"""How much KV an instance holds and can still take, by its own view. Lengths in tokens."""

from __future__ import annotations

import dataclasses

from tailrace.cluster import InstanceView, RequestView


def footprint_tokens(instance: InstanceView, queued_weight: float) -> float:
    """PASCAL's m_i, "total memory occupied by KV cache (GPU + CPU)", and what is on its way there.

    `queued_weight`: what a prompt token that was sent there but is not prefilled yet counts for.
    """
    return instance.kv_used_tokens + instance.host_kv_tokens + queued_weight * instance.prefill_backlog_tokens


def kv_needed_tokens(context_tokens: int, block_tokens: int) -> int:
    """Capacity that a request takes where it arrives: whole blocks, and one to grow into."""
    block_tokens = max(1, block_tokens)
    return (-(-context_tokens // block_tokens) + 1) * block_tokens


def fits_model(target: InstanceView, context_tokens: int) -> bool:
    """Whether the target's engine could go on with so long a request at all (0: its limit is not known)."""
    return target.max_model_len <= 0 or context_tokens < target.max_model_len


def fits_device(target: InstanceView, context_tokens: int, growth_tokens: int = 0) -> bool:
    """Whether the target has device memory for the request, and `growth_tokens` more."""
    needed = kv_needed_tokens(context_tokens + growth_tokens, target.block_tokens)
    return needed <= target.kv_free_tokens and fits_model(target, context_tokens)


def fits_host(target: InstanceView, context_tokens: int) -> bool:
    """Whether the request could wait in the target's host memory for its turn on the device."""
    needed = kv_needed_tokens(context_tokens, target.block_tokens)
    return (
        needed <= target.host_kv_capacity_tokens - target.host_kv_tokens
        and needed <= target.kv_capacity_tokens
        and fits_model(target, context_tokens)
    )


def with_request(target: InstanceView, request: RequestView) -> InstanceView:
    """The target as it will be once it has taken the request: for further decisions on the same view."""
    return dataclasses.replace(
        target,
        kv_used_tokens=target.kv_used_tokens + kv_needed_tokens(request.context_tokens, target.block_tokens),
        context_tokens=target.context_tokens + request.context_tokens,
        migrations_in=target.migrations_in + 1,
    )
