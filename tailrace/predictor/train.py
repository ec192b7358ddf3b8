"""Training as in ARES, section 4.4: L1 loss on tokens, AdamW, early stopping by the validation error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tailrace.predictor.file import FORMAT, Description, Predictor
from tailrace.predictor.network import LengthMlp, widths_for
from tailrace.predictor.samples import Samples
from tailrace.predictor.split import split_by_request


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """The paper's choices; rate and batch size are inside the ranges that it searches."""

    epochs: int = 100
    patience: int = 10
    rate: float = 1e-3
    batch: int = 128
    seed: int = 0
    # None: the paper's, in proportion to the hidden size.
    widths: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Epoch:
    """Mean absolute errors in tokens after one pass over the training samples."""

    number: int
    training_mae: float
    validation_mae: float


@dataclass(frozen=True, slots=True)
class Trained:
    """The predictor of the best epoch, and how it went."""

    predictor: Predictor
    epochs: list[Epoch]
    best: Epoch


def train(samples: Samples, options: TrainingOptions, report: Callable[[Epoch], None]) -> Trained:
    """Split by request and train; `report` hears of each epoch. Raises ValueError for too few requests."""
    parts = split_by_request(samples, options.seed)
    return train_on(parts.training, parts.validation, options, report)


def train_on(
    training: Samples, validation: Samples, options: TrainingOptions, report: Callable[[Epoch], None]
) -> Trained:
    """Train on one part, stop by the other. The result depends on the arguments alone."""
    draw = torch.Generator().manual_seed(options.seed)
    widths = options.widths or widths_for(training.hidden_size)
    network = _seeded_network(training.hidden_size, widths, options.seed)
    hidden, remaining = _tensors(training)
    seen, truth = _tensors(validation)
    network.fit_inputs(hidden, remaining)
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.rate)
    epochs: list[Epoch] = []
    best, kept = None, network.state_dict()
    for number in range(1, options.epochs + 1):
        total = 0.0
        for rows in torch.randperm(len(hidden), generator=draw).split(options.batch):
            # In units, not tokens, only so that the step size does not depend on the lengths; a constant
            # factor does not move the minimum.
            loss = (network(hidden[rows]) - remaining[rows]).abs().mean() / network.unit
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        with torch.inference_mode():
            error = (network(seen).clamp_min(0.0) - truth).abs().mean().item()
        epochs.append(Epoch(number, total / len(hidden) * network.unit.item(), error))
        report(epochs[-1])
        if best is None or error < best.validation_mae:
            best, kept = epochs[-1], copy.deepcopy(network.state_dict())
        elif number - best.number >= options.patience:
            break
    if best is None:
        raise ValueError("epochs must be 1 or more")
    network.load_state_dict(kept)
    description = Description(FORMAT, training.origin.model, training.hidden_size, widths, options.seed)
    return Trained(Predictor(description, network.requires_grad_(False).eval()), epochs, best)


def _seeded_network(hidden_size: int, widths: tuple[int, int, int], seed: int) -> LengthMlp:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LengthMlp(hidden_size, widths)


def _tensors(samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(samples.hidden), torch.from_numpy(samples.remaining).float()
