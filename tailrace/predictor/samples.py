"""Training samples of a predictor: hidden states, each with the number of tokens that followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

FORMAT: Final = "tailrace-length-samples-2"


class SamplesError(ValueError):
    """The file does not contain valid samples; the message names the file and the field."""


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How samples were collected."""

    format: str
    model: str
    # Output tokens of a request between two of its samples.
    interval: int
    # Mean duration in seconds and mean batch size of the engine's steps during collection, without steps
    # that only began a prompt.
    step_s: float
    batch: float


@dataclass(frozen=True, slots=True)
class Samples:
    """Sample i: the state `hidden[i]` of request `request[i]` with `generated[i]` output tokens and
    `remaining[i]` to come.

    Shapes (n, d) and (n,). State 0 of a request is that of its last prompt token. If `ended[i]` is false, the
    request was truncated by max_tokens or the model's longest context: `remaining[i]` tokens followed, and
    more would have.
    """

    origin: Origin
    hidden: NDArray[np.float32]
    request: NDArray[np.int32]
    generated: NDArray[np.int32]
    remaining: NDArray[np.int32]
    ended: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.request)

    @property
    def hidden_size(self) -> int:
        """Return the width of a state."""
        return int(self.hidden.shape[1])

    def select(self, mask: NDArray[np.bool_]) -> Samples:
        """Return the samples for which `mask` is set, in order."""
        return Samples(
            self.origin,
            self.hidden[mask],
            self.request[mask],
            self.generated[mask],
            self.remaining[mask],
            self.ended[mask],
        )

    def first(self) -> Samples:
        """Return the sample of each request before its first output token."""
        return self.select(self.generated == 0)


def write_samples(samples: Samples, path: Path) -> None:
    """Write samples to a safetensors file. Raise OSError."""
    from safetensors.numpy import save_file

    save_file(
        {
            "hidden": samples.hidden.astype(np.float16),
            "request": samples.request,
            "generated": samples.generated,
            "remaining": samples.remaining,
            "ended": samples.ended.astype(np.uint8),
        },
        path,
        metadata={"origin": msgspec.json.encode(samples.origin).decode()},
    )


def read_samples(path: Path) -> Samples:
    """Read a file written by write_samples. Raise SamplesError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise SamplesError(f"{path}: cannot be read: {error}") from error
    origin = _origin(path, metadata)
    names = ("request", "generated", "remaining", "ended")
    columns = {name: _column(path, tensors, name) for name in names}
    hidden = tensors.get("hidden")
    if hidden is None or hidden.ndim != 2 or not np.issubdtype(hidden.dtype, np.floating):
        raise SamplesError(f"{path}: hidden: must be a matrix of floating-point numbers")
    for name, values in columns.items():
        if len(values) != len(hidden):
            raise SamplesError(f"{path}: {name}: {len(values)} values for {len(hidden)} rows of hidden")
    if not np.isfinite(hidden).all():
        raise SamplesError(f"{path}: hidden: contains a value that is not a finite number")
    ended = columns.pop("ended").astype(np.bool_)
    return Samples(origin, hidden.astype(np.float32), **columns, ended=ended)


def _origin(path: Path, metadata: Mapping[str, str]) -> Origin:
    try:
        origin = msgspec.json.decode(metadata.get("origin", ""), type=Origin)
    except msgspec.DecodeError as error:
        raise SamplesError(f"{path}: origin: {error}") from error
    if origin.format != FORMAT:
        raise SamplesError(
            f"{path}: origin.format: {origin.format!r}, expected {FORMAT!r}: collect the samples again "
            "(tailrace predictor collect)"
        )
    return origin


def _column(path: Path, tensors: Mapping[str, NDArray[np.generic]], name: str) -> NDArray[np.int32]:
    values = tensors.get(name)
    if values is None or values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise SamplesError(f"{path}: {name}: must be a vector of integers")
    if values.size and int(np.min(values.astype(np.int64))) < 0:
        raise SamplesError(f"{path}: {name}: contains a negative number")
    return values.astype(np.int32)


TRAINING: Final = 0.70
VALIDATION: Final = 0.15


@dataclass(frozen=True, slots=True)
class Split:
    """Three disjoint sets of requests."""

    training: Samples
    validation: Samples
    test: Samples


def split_by_request(samples: Samples, seed: int) -> Split:
    """Split the requests at random, determined by the seed (ARES, section 4.4: 70%, 15%, 15%).

    States of one request resemble each other: a request with samples in two parts would be recognized, not
    predicted. Raise ValueError for fewer than 10 requests.
    """
    requests = np.unique(samples.request)
    if len(requests) < 10:
        raise ValueError(f"{len(requests)} requests cannot be split: collect 10 or more")
    shuffled = np.random.default_rng(seed).permutation(requests)
    first, second = int(len(requests) * TRAINING), int(len(requests) * (TRAINING + VALIDATION))
    parts = (
        samples.select(np.isin(samples.request, chosen))
        for chosen in (shuffled[:first], shuffled[first:second], shuffled[second:])
    )
    return Split(*parts)
