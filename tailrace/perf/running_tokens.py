"""How many tokens a batch may hold for its steps to keep a TPOT SLO (Arrow, section 5.3, "Instance Load
Evaluation")."""

from __future__ import annotations

from typing import Final

from tailrace.profiles import Profile

UNLIMITED_TOKENS: Final = 2**53
"""More than any KV holds, and exact in JSON and in floating point."""


def max_running_tokens(profile: Profile, tpot_slo_s: float, context_tokens: int) -> int:
    """Most tokens in a batch that one decode step does within the TPOT SLO (section 5.3, third bullet).

    As profiling would find it with requests of `context_tokens` each. KV capacity limits it too, and is the
    instance's; UNLIMITED_TOKENS when no load makes a step too long.
    """
    decode = profile.decode
    spare_ms = tpot_slo_s * 1e3 - decode.base_ms
    if spare_ms <= 0.0:
        return 0
    per_token_ms = decode.ms_per_kv_token + decode.ms_per_request / max(1, context_tokens)
    # Fits of flat steps have slopes of 0, or so small that the quotient exceeds every integer type.
    if per_token_ms * UNLIMITED_TOKENS <= spare_ms:
        return UNLIMITED_TOKENS
    return int(spare_ms / per_token_ms)
