"""What a simulated engine is given."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tailrace.profiles import Profile
from tailrace.tiny import MODEL_PATH


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


class SimulatedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one simulated engine; lengths in tokens.

    Engines continue each other's requests and exchange KV when all but the speed, the capacities and the
    profile's step times are equal.
    """

    model: str = "simulated"
    # Name of a built-in profile, or a path: step times, and the KV capacity unless kv_blocks is given.
    profile: str = "llama-3.1-8b-h100"
    # Steps take the profile's time divided by this.
    speed: float = 1.0
    kv_blocks: int | None = None
    block_tokens: int = 16
    num_layers: int = 2
    # Bytes that a transfer really moves for each token; the profile's true number is for planning.
    kv_bytes_per_token: int = 64
    # Host memory for the KV of preempted requests, by the profile's bytes a token. A step waits for what is
    # copied to and from there, as the profile's `swap` has it.
    host_kv_bytes: int = 4 << 30
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    # Folder with a tokenizer.json whose tokens are byte-level.
    tokenizer: str = str(MODEL_PATH)
    think: str = "<think>"
    end_think: str = "</think>"
    # Lengths are drawn from the prompt's hash, exponentially around these means; 0 reasoning tokens means
    # a model that does not reason.
    reasoning_mean_tokens: int = 64
    answer_mean_tokens: int = 64
    # Relative error of predicted lengths: each prediction is off by up to this share of the true one. None:
    # nothing is predicted.
    prediction_error: float | None = None
    # Stands for the weights: another seed, another model.
    weights_seed: int = 0
    # Keeps the KV of requests that have gone, by name, for prompts and for requests from elsewhere.
    prefix_caching: bool = False
    # Why its requests go by replay; empty: they go live.
    replay_reason: str = ""
    # A prompt, in letters of ASCII, of which the engine dies as soon as it has computed it.
    dies_of: str = ""


@dataclass(slots=True)
class Faults:
    """What tests make an engine do wrong; may be changed while it runs."""

    # Every request fails here instead of making the token of this index.
    fail_at_index: int | None = None
    # The engine dies in the step in which a request with this prompt would make the token of this index.
    die_on_prompt: tuple[int, ...] | None = None
    die_at_index: int = 0
    # Steps no more, and says nothing; what was running stays.
    hang: bool = False
    # Refuses to import, with this reason.
    refuse_import: str | None = None
    # A bit of this block flips between its checksum and the wire.
    flip_bit_in_block: int | None = None
    # This block is sent with another's bytes, and with the right checksum for them.
    send_wrong_block: int | None = None
