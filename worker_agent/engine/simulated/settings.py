"""Settings and faults of simulated engines."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tailrace.profiles import Profile
from tailrace.tiny import MODEL_PATH


def at_speed(profile: Profile, speed: float) -> Profile:
    """Return the profile with all times divided by `speed`."""
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

    Engines can continue each other's requests and exchange KV if all settings other than the speed, the
    capacities and the profile are equal.
    """

    model: str = "simulated"
    # The profile with step times and, unless kv_blocks is given, the KV capacity, or its name or path.
    profile: str | Profile = "llama-3.1-8b-h100"
    # Divides the profile's step times.
    speed: float = 1.0
    kv_blocks: int | None = None
    block_tokens: int = 16
    num_layers: int = 2
    # Bytes that transfers move per token; planning uses the profile's number.
    kv_bytes_per_token: int = 64
    # Host memory for the KV of preempted requests, at the profile's bytes per token. Steps wait for copies to
    # and from host memory as given by the profile's `swap`.
    host_kv_bytes: int = 4 << 30
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    # Folder with the tokenizer.json of a byte-level tokenizer.
    tokenizer: str = str(MODEL_PATH)
    think: str = "<think>"
    end_think: str = "</think>"
    # Lengths are drawn from the prompt's hash, exponentially around these means; 0 reasoning tokens means
    # a model that does not reason.
    reasoning_mean_tokens: int = 64
    answer_mean_tokens: int = 64
    # Largest relative error of predicted lengths; None: no predictions.
    prediction_error: float | None = None
    # Represents the weights: engines with different seeds have different models.
    weights_seed: int = 0
    # Keep the KV of ended requests, by name, for later prompts and imports.
    prefix_caching: bool = False
    # Why requests migrate by replay; empty: they migrate live.
    replay_reason: str = ""
    # An ASCII prompt that kills the engine as soon as it has computed it.
    dies_of: str = ""


@dataclass(slots=True)
class SimulatedFaults:
    """Faults for tests; may be changed while the engine runs."""

    # Every request fails instead of generating the token with this index.
    fail_at_index: int | None = None
    # The engine dies in the step in which a request with this prompt would generate the token with this
    # index.
    die_on_prompt: tuple[int, ...] | None = None
    die_at_index: int = 0
    # The engine stops stepping without reporting anything; its requests remain.
    hang: bool = False
    # Refuse imports with this reason.
    refuse_import: str | None = None
    # Flip a bit of this block after its checksum has been computed.
    flip_bit_in_block: int | None = None
    # Send this block with another one's bytes and their correct checksum.
    send_wrong_block: int | None = None
