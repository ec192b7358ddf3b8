"""A trained predictor, and the safetensors file that holds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tailrace.predictor.network import HazardMlp, cumulative, quantile

FORMAT: Final = "tailrace-length-predictor-2"


POINT: Final = 0.5
"""The quantile that is the prediction where a number is wanted, ARES's N^(r): the median, at which the L1
loss that the paper trains with is least."""


class PredictorFileError(ValueError):
    """The file does not contain a valid predictor; the message names the file and the field."""


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a predictor was trained for."""

    format: str
    # Of the samples: the model as it was named when they were collected.
    model: str
    hidden_size: int
    widths: tuple[int, int, int]
    # Seed by which the samples were split, so that evaluation tests what training has not seen.
    split_seed: int
    # Bins of remaining length (`hazards`); files of other formats do not name any.
    bins: int = 0


@dataclass(frozen=True, slots=True)
class Predictor:
    """A trained network, ready for use."""

    description: Description
    network: HazardMlp

    def remaining(self, hidden: NDArray[np.float32], level: float = POINT) -> NDArray[np.float32]:
        """Return the quantile `level` of the remaining tokens, at least 0, for states (n, d).

        It is at most the longest remaining length in the training samples.
        """
        return np.asarray(self.remaining_on_device(torch.from_numpy(hidden), level).numpy())

    def remaining_on_device(self, hidden: torch.Tensor, level: float = POINT) -> torch.Tensor:
        """Return the same for a tensor on the device of the network's weights."""
        with torch.inference_mode():
            return quantile(self.network(hidden.float()), self.network.edges, level)

    def share_within(self, hidden: NDArray[np.float32], tokens: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return the probability that at most `tokens` (n,) remain."""
        with torch.inference_mode():
            hazards = self.network(torch.from_numpy(hidden))
            total = cumulative(hazards, self.network.edges, torch.from_numpy(tokens).float())
        return np.asarray((-torch.expm1(-total)).numpy(), dtype=np.float64)


def save_predictor(predictor: Predictor, path: Path) -> None:
    """Write a predictor to a safetensors file. Raise OSError."""
    state = {
        name: value.detach().cpu().contiguous() for name, value in predictor.network.state_dict().items()
    }
    save_file(state, path, metadata={"description": msgspec.json.encode(predictor.description).decode()})


def load_predictor(path: Path, device: str = "cpu") -> Predictor:
    """Load a predictor onto a device. Raise PredictorFileError."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise PredictorFileError(f"{path}: cannot be read: {error}") from error
    try:
        description = msgspec.json.decode(metadata.get("description", ""), type=Description)
    except msgspec.DecodeError as error:
        raise PredictorFileError(f"{path}: description: {error}") from error
    if description.format != FORMAT:
        raise PredictorFileError(
            f"{path}: description.format: {description.format!r}, expected {FORMAT!r}: train it again "
            "(tailrace predictor collect, then train)"
        )
    if min(description.hidden_size, *description.widths, description.bins) < 1:
        raise PredictorFileError(f"{path}: description: hidden_size, widths and bins must be positive")
    network = HazardMlp(description.hidden_size, description.widths, description.bins)
    for name, parameter in network.state_dict().items():
        if name not in state or state[name].shape != parameter.shape:
            shape = tuple(state[name].shape) if name in state else "nothing"
            raise PredictorFileError(
                f"{path}: {name}: shape {tuple(parameter.shape)} expected, found {shape}"
            )
        if not torch.isfinite(state[name]).all():
            raise PredictorFileError(f"{path}: {name}: contains a value that is not a finite number")
    unknown = sorted(state.keys() - network.state_dict().keys())
    if unknown:
        raise PredictorFileError(f"{path}: {unknown[0]}: unknown")
    edges = state["edges"]
    if edges[0] != 0.0 or not (edges[1:] > edges[:-1]).all():
        raise PredictorFileError(f"{path}: edges: must increase from 0")
    network.load_state_dict(state)
    return Predictor(description, network.requires_grad_(False).eval().to(device))
