"""Performance profiles: how long one model on one GPU takes for a step, as data.

A profile is a JSON file. Built-in ones stand beside this module; `load_profile` takes their names or a path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from tailrace.bounded import read_regular, shown

BUILT_IN: Final[Path] = Path(__file__).resolve().parent

# A nanosecond for a step of one token: less is no measurement, and is lost in the arithmetic of fits.
_LEAST_STEP_MS: Final = 1e-6
# More per step or token is no measurement, and a simulation would not come to an end.
_MOST_MS: Final = 1e6
# Sums and products with floats stay exact.
_MOST: Final = 2**53


def _require_time(name: str, ms: float) -> None:
    """Raise ValueError unless a coefficient is a time."""
    if not 0.0 <= ms <= _MOST_MS:
        raise ValueError(f"{name} is {ms}: must be from 0 to {_MOST_MS:.0f} ms")


def _require_times(stage: str, model: PrefillModel | DecodeModel) -> None:
    """Raise ValueError unless every coefficient is a time and a step of this stage takes some."""
    times: dict[str, float] = msgspec.structs.asdict(model)
    for name, value in times.items():
        _require_time(f"{stage}.{name}", value)
    if sum(times.values()) < _LEAST_STEP_MS:
        raise ValueError(f"{stage}: every coefficient is next to 0, so that no step takes any time")


class PrefillModel(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds to prefill L tokens: base + per_token * L + per_token_squared * L^2."""

    base_ms: float
    ms_per_token: float
    ms_per_token_squared: float

    def __post_init__(self) -> None:
        """Raise ValueError that names the coefficient when one is out of range."""
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
        """Raise ValueError that names the coefficient when one is out of range, or all are zero."""
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
        _require_time("swap.base_ms", self.base_ms)
        if not self.bytes_per_s >= 1.0:
            raise ValueError(f"swap.bytes_per_s is {self.bytes_per_s}: must be at least 1")

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
        """Raise ValueError that names the field when a size is out of range."""
        for name in ("kv_bytes_per_token", "kv_capacity_tokens"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise ValueError(f"{name} is {getattr(self, name)}: must be from 1 to {_MOST}")

    def step_ms(self, prefill_ms: float, requests: int, kv_tokens: int) -> float:
        """Milliseconds of a step that prefills chunks (their PrefillModel.ms summed) and decodes a batch."""
        if not requests:
            return self.prefill.base_ms + prefill_ms
        decode_ms = self.decode.ms(requests, kv_tokens)
        if not prefill_ms:
            return self.decode.base_ms + decode_ms
        # One pass over the weights serves both; the larger base is that pass.
        return max(self.prefill.base_ms, self.decode.base_ms) + prefill_ms + decode_ms


class ProfileError(Exception):
    """There is no such profile, or it is malformed; the message says which and why."""


def built_in_profiles() -> list[str]:
    """Return the names of the profiles that come with Tailrace."""
    return sorted(path.stem for path in BUILT_IN.glob("*.json"))


def load_profile(name: str) -> Profile:
    """Load a built-in profile by name, or the JSON file at the path `name`. Raise ProfileError."""
    path = BUILT_IN / f"{name}.json" if name in built_in_profiles() else Path(name)
    try:
        text = read_regular(path)
        profile = msgspec.json.decode(text, type=Profile)
        unknown = _unknown_field(msgspec.json.decode(text), msgspec.to_builtins(profile))
    except OSError as error:
        known = ", ".join(built_in_profiles())
        raise ProfileError(f"no profile {shown(name)}: {error.strerror}; built in are {known}") from error
    except msgspec.DecodeError as error:
        raise ProfileError(f"profile {name!r}: {error}") from error
    if unknown:
        raise ProfileError(f"profile {name!r}: unknown field {shown(unknown)}; remove or correct it")
    return profile


def _unknown_field(given: dict[str, Any], known: dict[str, Any]) -> str:
    """Return the path of a field that no profile has; "" if there is none.

    Not left to the structs: records in etcd have them too, and a later version's may have more fields.
    """
    for name, value in given.items():
        if name not in known:
            return name
        if isinstance(value, dict) and (inner := _unknown_field(value, known[name])):
            return f"{name}.{inner}"
    return ""
