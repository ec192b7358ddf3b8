"""What a predictor is trained on: hidden states with the number of tokens that were still to come."""

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
    """The file holds no samples; the message names the file and the field."""


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How samples were made."""

    format: str
    model: str
    # Output tokens of a request between two of its samples.
    interval: int
    # Of the engine's steps while they were made, without those that only began a prompt: mean duration and
    # mean number of requests.
    step_s: float
    batch: float


@dataclass(frozen=True, slots=True)
class Samples:
    """Sample i: the state `hidden[i]` of request `request[i]` with `generated[i]` output tokens so far and
    `remaining[i]` to come. Shapes (n, d) and (n,). State 0 of a request is that of its last prompt token.

    Where `ended[i]` is false the request was cut off, by max_tokens or the model's longest context:
    `remaining[i]` tokens did come, and more would have.
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
        """Width of a state."""
        return int(self.hidden.shape[1])

    def of(self, chosen: NDArray[np.bool_]) -> Samples:
        """The chosen ones, in order."""
        return Samples(
            self.origin,
            self.hidden[chosen],
            self.request[chosen],
            self.generated[chosen],
            self.remaining[chosen],
            self.ended[chosen],
        )

    def first(self) -> Samples:
        """What is known of each request when nothing has been generated."""
        return self.of(self.generated == 0)


def write_samples(samples: Samples, path: Path) -> None:
    """Write a safetensors file. Raises OSError."""
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
    """Read what write_samples wrote. Raises SamplesError."""
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
        raise SamplesError(f"{path}: hidden: rows of numbers expected")
    for name, values in columns.items():
        if len(values) != len(hidden):
            raise SamplesError(f"{path}: {name}: {len(values)} values for {len(hidden)} rows of hidden")
    if not np.isfinite(hidden).all():
        raise SamplesError(f"{path}: hidden: not a number in it")
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
        raise SamplesError(f"{path}: {name}: a list of whole numbers expected")
    if values.size and int(np.min(values.astype(np.int64))) < 0:
        raise SamplesError(f"{path}: {name}: a negative number in it")
    return values.astype(np.int32)


TRAINING: Final = 0.70
VALIDATION: Final = 0.15


@dataclass(frozen=True, slots=True)
class Split:
    """The three parts; no request is in two of them."""

    training: Samples
    validation: Samples
    test: Samples


def split_by_request(samples: Samples, seed: int) -> Split:
    """Split by a shuffle that only the seed decides (ARES, section 4.4: 70%, 15%, 15%).

    States of one request resemble each other: one whose samples were on both sides would be recognised rather
    than predicted. Raises ValueError for fewer than 10 requests.
    """
    requests = np.unique(samples.request)
    if len(requests) < 10:
        raise ValueError(f"{len(requests)} requests cannot be split: collect 10 or more")
    shuffled = np.random.default_rng(seed).permutation(requests)
    first, second = int(len(requests) * TRAINING), int(len(requests) * (TRAINING + VALIDATION))
    parts = (
        samples.of(np.isin(samples.request, chosen))
        for chosen in (shuffled[:first], shuffled[first:second], shuffled[second:])
    )
    return Split(*parts)
