"""Train a predictor as in ARES, section 4.4: AdamW, and early stopping by the validation loss, but with
another loss.

The paper minimizes the L1 loss in tokens, whose minimum is the median. The lengths of truncated requests are
unknown, and without them it would be the median of the shorter requests. Here the loss is the negative
log-likelihood of what is known (`hazards`), and the prediction is the median of the resulting distribution.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tailrace.predictor.file import FORMAT, POINT, Description, Predictor
from tailrace.predictor.network import HazardMlp, negative_log_likelihood, quantile, widths_for
from tailrace.predictor.samples import Samples, split_by_request


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """The paper's choices; learning rate and batch size are within the ranges that it searches."""

    epochs: int = 100
    patience: int = 10
    rate: float = 1e-3
    batch: int = 128
    seed: int = 0
    # None: the paper's, in proportion to the hidden size.
    widths: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Epoch:
    """The losses (mean negative log-likelihoods) after one pass over the training samples."""

    number: int
    training_loss: float
    validation_loss: float
    # Mean absolute error of the median, in tokens; a lower bound for truncated requests.
    validation_mae: float


@dataclass(frozen=True, slots=True)
class Trained:
    """The predictor of the best epoch, and the losses of all epochs."""

    predictor: Predictor
    epochs: list[Epoch]
    best: Epoch


def train(samples: Samples, options: TrainingOptions, report: Callable[[Epoch], None]) -> Trained:
    """Split by request and train; call `report` after each epoch. Raise ValueError for too few requests."""
    parts = split_by_request(samples, options.seed)
    return train_on(parts.training, parts.validation, options, report)


def train_on(
    training: Samples, validation: Samples, options: TrainingOptions, report: Callable[[Epoch], None]
) -> Trained:
    """Train on one part and stop early by the other. The result depends only on the arguments.

    Raise ValueError if no training request ended by itself, or `options.epochs` is below 1.
    """
    draw = torch.Generator().manual_seed(options.seed)
    widths = options.widths or widths_for(training.hidden_size)
    network = _seeded_network(training.hidden_size, widths, options.seed)
    if not training.ended.any():
        raise ValueError("all training requests were truncated: raise --max-tokens and collect samples again")
    hidden, remaining, ended = _tensors(training)
    validation_hidden, truth, exact = _tensors(validation)
    network.fit_inputs(hidden, remaining, ended)
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.rate)
    epochs: list[Epoch] = []
    best, best_weights = None, network.state_dict()
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
            hazards = network(validation_hidden)
            loss = negative_log_likelihood(hazards, network.edges, truth, exact).mean()
            error = least_error(quantile(hazards, network.edges, POINT), truth, exact).mean()
        epochs.append(Epoch(number, total / len(hidden), loss.item(), error.item()))
        report(epochs[-1])
        if best is None or epochs[-1].validation_loss < best.validation_loss:
            best, best_weights = epochs[-1], copy.deepcopy(network.state_dict())
        elif number - best.number >= options.patience:
            break
    if best is None:
        raise ValueError("epochs must be 1 or more")
    network.load_state_dict(best_weights)
    description = Description(
        FORMAT, training.origin.model, training.hidden_size, widths, options.seed, len(network.edges) - 1
    )
    return Trained(Predictor(description, network.requires_grad_(False).eval()), epochs, best)


def least_error(predicted: torch.Tensor, known: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
    """Return the absolute error of each prediction; for truncated requests, its lower bound."""
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
