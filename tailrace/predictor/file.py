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

from tailrace.predictor.network import LengthMlp

FORMAT: Final = "tailrace-length-predictor-1"


class PredictorFileError(ValueError):
    """The file holds no predictor; the message names the file and the field."""


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a predictor is for."""

    format: str
    # Of the samples: the model as it was named when they were collected.
    model: str
    hidden_size: int
    widths: tuple[int, int, int]
    # Seed by which the samples were split, so that evaluation tests what training has not seen.
    split_seed: int


@dataclass(frozen=True, slots=True)
class Predictor:
    """A network with its weights, ready to be asked."""

    description: Description
    network: LengthMlp

    def remaining(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Tokens still to come, at least 0, for states (n, d)."""
        return np.asarray(self.remaining_on_device(torch.from_numpy(hidden)).numpy())

    def remaining_on_device(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same for a tensor where the network's weights are."""
        with torch.inference_mode():
            return self.network(hidden.float()).clamp_min(0.0)


def save_predictor(predictor: Predictor, path: Path) -> None:
    """Raises OSError."""
    state = {
        name: value.detach().cpu().contiguous() for name, value in predictor.network.state_dict().items()
    }
    save_file(state, path, metadata={"description": msgspec.json.encode(predictor.description).decode()})


def load_predictor(path: Path, device: str = "cpu") -> Predictor:
    """Raises PredictorFileError."""
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
        raise PredictorFileError(f"{path}: description.format: {description.format!r}, expected {FORMAT!r}")
    if min(description.hidden_size, *description.widths) < 1:
        raise PredictorFileError(f"{path}: description: hidden_size and widths must be positive")
    network = LengthMlp(description.hidden_size, description.widths)
    for name, own in network.state_dict().items():
        if name not in state or state[name].shape != own.shape:
            found = tuple(state[name].shape) if name in state else "nothing"
            raise PredictorFileError(f"{path}: {name}: shape {tuple(own.shape)} expected, found {found}")
        if not torch.isfinite(state[name]).all():
            raise PredictorFileError(f"{path}: {name}: not a number in it")
    unknown = sorted(state.keys() - network.state_dict().keys())
    if unknown:
        raise PredictorFileError(f"{path}: {unknown[0]}: unknown")
    network.load_state_dict(state)
    return Predictor(description, network.requires_grad_(False).eval().to(device))
