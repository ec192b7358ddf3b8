"""Performance profiles: how long one model on one GPU takes for a step, as data.

A profile is a JSON file. Built-in ones stand beside this module; `load_profile` takes their names or a path.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import msgspec

from tailrace.bounded import read_regular, shown

BUILT_IN: Final[Path] = Path(__file__).resolve().parent


class PrefillModel(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds to prefill L tokens: base + per_token * L + per_token_squared * L^2."""

    base_ms: float
    ms_per_token: float
    ms_per_token_squared: float

    def __post_init__(self) -> None:
        """Raise ValueError that names the coefficient when one is negative or not finite."""
        _require_times("prefill", self)

    def ms(self, start: int, end: int) -> float:
        """Milliseconds for tokens [start, end) of one prompt, without the base."""
        return self.ms_per_token * (end - start) + self.ms_per_token_squared * (end * end - start * start)


class DecodeModel(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of one decode step: base + per_request * B + per_kv_token * K."""

    base_ms: float
    ms_per_request: float
    ms_per_kv_token: float

    def __post_init__(self) -> None:
        """Raise ValueError that names the coefficient when one is negative or not finite, or all are zero."""
        _require_times("decode", self)

    def ms(self, requests: int, kv_tokens: int) -> float:
        """Milliseconds for this many requests with this many tokens of KV in all, without the base."""
        return self.ms_per_request * requests + self.ms_per_kv_token * kv_tokens


class SwapModel(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds that a step waits to copy one request's KV to host memory or back: base + bytes / rate.

    The defaults are a PCIe 5.0 x16 link as an H100 reaches it (52.8 GB/s device to host,
    https://github.com/NVIDIA/nvbandwidth/issues/24), and what one request costs besides on our vLLM workers
    (docs/simulator.md).
    """

    base_ms: float = 1.0
    bytes_per_s: float = 52.8e9

    def __post_init__(self) -> None:
        """Raise ValueError that names the number when it is out of range."""
        if not (math.isfinite(self.base_ms) and self.base_ms >= 0.0):
            raise ValueError(f"swap.base_ms is {self.base_ms}: must be finite and not negative")
        if not self.bytes_per_s > 0.0:
            raise ValueError(f"swap.bytes_per_s is {self.bytes_per_s}: must be positive")

    def ms(self, kv_bytes: int) -> float:
        """Milliseconds for one request with so many bytes of KV, one way."""
        return self.base_ms + 1e3 * kv_bytes / self.bytes_per_s


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one GPU."""

    name: str
    model: str
    gpu: str
    prefill: PrefillModel
    decode: DecodeModel
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    # Where each number comes from.
    sources: dict[str, str]
    swap: SwapModel = SwapModel()

    def __post_init__(self) -> None:
        """Raise ValueError that names the field when a size is not positive."""
        for name in ("kv_bytes_per_token", "kv_capacity_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: must be positive")

    def step_ms(self, prefill_ms: float, requests: int, kv_tokens: int) -> float:
        """Milliseconds of a step that prefills chunks (their PrefillModel.ms summed) and decodes a batch."""
        if not requests:
            return self.prefill.base_ms + prefill_ms
        decode_ms = self.decode.ms(requests, kv_tokens)
        if not prefill_ms:
            return self.decode.base_ms + decode_ms
        # One pass over the weights serves both; the larger base is that pass.
        return max(self.prefill.base_ms, self.decode.base_ms) + prefill_ms + decode_ms


# A nanosecond for a step of one token: less is no measurement, and is lost in the arithmetic of fits.
_LEAST_STEP_MS: Final = 1e-6


def _require_times(stage: str, model: PrefillModel | DecodeModel) -> None:
    """Raise ValueError unless every coefficient is a time and a step of this stage takes some."""
    times: dict[str, float] = msgspec.structs.asdict(model)
    for name, value in times.items():
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{stage}.{name} is {value}: must be finite and not negative")
    if sum(times.values()) < _LEAST_STEP_MS:
        raise ValueError(f"{stage}: every coefficient is next to 0, so that no step takes any time")


class ProfileError(Exception):
    """There is no such profile, or it is malformed; the message says which and why."""


def built_in_profiles() -> list[str]:
    """Return the names of the profiles that come with Tailrace."""
    return sorted(path.stem for path in BUILT_IN.glob("*.json"))


def load_profile(name: str) -> Profile:
    """Load a built-in profile by name, or the JSON file at the path `name`. Raise ProfileError."""
    path = BUILT_IN / f"{name}.json" if name in built_in_profiles() else Path(name)
    try:
        return msgspec.json.decode(read_regular(path), type=Profile)
    except OSError as error:
        known = ", ".join(built_in_profiles())
        raise ProfileError(f"no profile {shown(name)}: {error.strerror}; built in are {known}") from error
    except msgspec.DecodeError as error:
        raise ProfileError(f"profile {name!r}: {error}") from error
