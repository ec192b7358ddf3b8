"""A profile at another speed."""

from __future__ import annotations

import msgspec

from tailrace.profiles import Profile


def at_speed(profile: Profile, speed: float) -> Profile:
    """The same with every time divided by `speed`."""
    prefill, decode = profile.prefill, profile.decode
    return msgspec.structs.replace(
        profile,
        prefill=msgspec.structs.replace(
            prefill,
            base_ms=prefill.base_ms / speed,
            ms_per_token=prefill.ms_per_token / speed,
            ms_per_token_squared=prefill.ms_per_token_squared / speed,
        ),
        decode=msgspec.structs.replace(
            decode,
            base_ms=decode.base_ms / speed,
            ms_per_request=decode.ms_per_request / speed,
            ms_per_kv_token=decode.ms_per_kv_token / speed,
        ),
        swap=msgspec.structs.replace(
            profile.swap,
            base_ms=profile.swap.base_ms / speed,
            bytes_per_s=profile.swap.bytes_per_s * speed,
        ),
    )
