"""Training as in ARES, section 4.4: AdamW, early stopping by the validation loss; the loss is another.

The paper minimises the L1 loss in tokens, whose minimum is the median. With requests that were cut off it is
not known, and without them it is the median of the shorter ones. Here the loss is the negative logarithm of
the likelihood of what is known (`hazards`), and the prediction the median of the distribution that it gives.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tailrace.predictor.file import FORMAT, POINT, Description, Predictor
from tailrace.predictor.hazards import negative_log_likelihood, quantile
from tailrace.predictor.network import HazardMlp, widths_for
from tailrace.predictor.samples import Samples, split_by_request


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
    """Mean negative log-likelihoods after one pass over the training samples."""

    number: int
    training_loss: float
    validation_loss: float
    # Mean absolute error of the median in tokens. Of a sample that was cut off, what it is at least.
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
    if not training.ended.any():
        raise ValueError(
            "no request of the training part ended by itself: raise --max-tokens and collect again"
        )
    hidden, remaining, ended = _tensors(training)
    seen, truth, exact = _tensors(validation)
    network.fit_inputs(hidden, remaining, ended)
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.rate)
    epochs: list[Epoch] = []
    best, kept = None, network.state_dict()
    for number in range(1, options.epochs + 1):
        total = 0.0
        for rows in torch.randperm(len(hidden), generator=draw).split(options.batch):
            hazards = network(hidden[rows])
            loss = negative_log_likelihood(hazards, network.edges, remaining[rows], ended[rows]).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        with torch.inference_mode():
            hazards = network(seen)
            loss = negative_log_likelihood(hazards, network.edges, truth, exact).mean()
            error = least_error(quantile(hazards, network.edges, POINT), truth, exact).mean()
        epochs.append(Epoch(number, total / len(hidden), loss.item(), error.item()))
        report(epochs[-1])
        if best is None or epochs[-1].validation_loss < best.validation_loss:
            best, kept = epochs[-1], copy.deepcopy(network.state_dict())
        elif number - best.number >= options.patience:
            break
    if best is None:
        raise ValueError("epochs must be 1 or more")
    network.load_state_dict(kept)
    description = Description(
        FORMAT, training.origin.model, training.hidden_size, widths, options.seed, len(network.edges) - 1
    )
    return Trained(Predictor(description, network.requires_grad_(False).eval()), epochs, best)


def least_error(predicted: torch.Tensor, known: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
    """Absolute error of each prediction; for one that was cut off, how much the prediction is too short."""
    short = known - predicted
    return torch.where(ended, short.abs(), short.clamp_min(0.0))


def _seeded_network(hidden_size: int, widths: tuple[int, int, int], seed: int) -> HazardMlp:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return HazardMlp(hidden_size, widths)


def _tensors(samples: Samples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(samples.hidden),
        torch.from_numpy(samples.remaining).float(),
        torch.from_numpy(samples.ended),
    )
