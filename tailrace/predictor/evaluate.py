"""How good a predictor is, against two that see less, how far its quantiles hold, and what asking it costs.

Requests that were cut off are among those that are tested. Of them it is known what the error is at least: by
how much the prediction is shorter than what came. So mean errors are lower bounds wherever some were cut off.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tailrace.predictor.distribution import Coverage, KaplanMeier, coverage
from tailrace.predictor.file import POINT, Predictor
from tailrace.predictor.hazards import quantile
from tailrace.predictor.network import widths_for
from tailrace.predictor.samples import Samples, Split
from tailrace.predictor.train import Epoch, TrainingOptions, train_on

INTERVAL_STEPS: Final = 20
"""Steps from one prediction to the next (ARES, section 5.3)."""

_EDGES: Final = (0, 1, 100, 200, 500, 1000, 2000, 4000, 8000, 16_000, 32_000, 1 << 30)
_WARM_UP, _TIMED = 20, 200
_PROMPT_BATCH: Final = 16
_PROMPT_SEEDS: Final = 3

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Mean absolute errors, in tokens, of samples with `generated_from` <= generated < `generated_to`.

    Of `cut_off` of the requests only the least error is known, and the least that was to come.
    """

    generated_from: int
    generated_to: int
    samples: int
    requests: int
    cut_off: int
    mean_remaining: float
    predictor: float
    lengths_alone: float
    prompt_only: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call for a batch of `batch` states, against the steps of the engine between two calls."""

    batch: int
    call_s: float
    step_s: float
    interval_steps: int

    @property
    def share(self) -> float:
        """Of step time."""
        return self.call_s / (self.interval_steps * self.step_s)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Errors on requests that training has not seen.

    `same_requests` holds, row by row, only the samples of the longest quarter of the test requests, so that
    rows differ in what has been generated and not in the requests; the paper's Figure 7 does the same.
    """

    test_requests: int
    parameters: int
    coverage: list[Coverage]
    total: ErrorRow
    by_generated: list[ErrorRow]
    longest_length: int
    same_requests: list[ErrorRow]
    cost: Cost


def evaluate(predictor: Predictor, split: Split) -> Evaluation:
    """Test on the split's test part; the two others are trained on its training part.

    lengths_alone: nothing is known of a request but how much it has made; the median of those training
    requests that were longer. prompt_only: a network like the predictor's sees the state of the last prompt
    token, once, and says the median of such requests that are longer than what has been made.
    """
    test = split.test
    predictions = {
        "predictor": predictor.remaining(test.hidden).astype(np.float64),
        "lengths_alone": _lengths_alone(split),
        "prompt_only": _prompt_only(predictor, split),
    }
    lengths = test.generated + test.remaining
    longest = int(np.quantile(test.first().remaining, 0.75))
    everything = np.ones(len(test), dtype=np.bool_)
    return Evaluation(
        test_requests=len(np.unique(test.request)),
        parameters=sum(weights.numel() for weights in predictor.network.parameters()),
        coverage=coverage(predictor, test),
        total=_row(test, predictions, everything, 0, int(lengths.max())),
        by_generated=_rows(test, predictions, everything),
        longest_length=longest,
        same_requests=_rows(test, predictions, lengths >= longest),
        cost=_cost(predictor, test),
    )


def _lengths_alone(split: Split) -> Values:
    """Predicted remaining lengths of the test samples, from how long the training requests were."""
    first = split.training.first()
    known = KaplanMeier(first.remaining.astype(np.float64), first.ended)
    generated = split.test.generated.astype(np.float64)
    return known.median_after(generated) - generated


def _prompt_only(predictor: Predictor, split: Split) -> Values:
    """Predicted remaining lengths of the test samples, from the prompt and how much has been made."""
    prompts = split.training.first()
    # A sample a request is few: smaller batches, and as many steps as the predictor may take. What comes out
    # then depends on the first weights and the widths, so the best of several on the validation requests.
    longer = max(1, round(len(split.training) / len(prompts) * _PROMPT_BATCH / TrainingOptions().batch))
    base = TrainingOptions(batch=_PROMPT_BATCH)
    base = replace(base, epochs=base.epochs * longer, patience=base.patience * longer)
    trained = min(
        (
            train_on(prompts, split.validation.first(), replace(base, seed=seed, widths=widths), _silent)
            for widths in {predictor.description.widths, widths_for(split.test.hidden_size)}
            for seed in range(_PROMPT_SEEDS)
        ),
        key=lambda candidate: candidate.best.validation_loss,
    )
    network = trained.predictor.network
    first, test = split.test.first(), split.test
    row_of = {request: row for row, request in enumerate(first.request.tolist())}
    rows = torch.tensor([row_of[request] for request in test.request.tolist()])
    with torch.inference_mode():
        hazards = network(torch.from_numpy(first.hidden))[rows]
        made = torch.from_numpy(test.generated).float()
        return np.asarray(quantile(hazards, network.edges, POINT, made).numpy(), dtype=np.float64)


def _silent(_: Epoch) -> None:
    """Nobody listens."""


def _rows(samples: Samples, predictions: dict[str, Values], among: NDArray[np.bool_]) -> list[ErrorRow]:
    rows = []
    for low, high in pairwise(_EDGES):
        chosen = among & (samples.generated >= low) & (samples.generated < high)
        if chosen.any():
            rows.append(_row(samples, predictions, chosen, low, high))
    return rows


def _row(
    samples: Samples, predictions: dict[str, Values], chosen: NDArray[np.bool_], low: int, high: int
) -> ErrorRow:
    known, ended = samples.remaining[chosen], samples.ended[chosen]
    short = {name: known - values[chosen] for name, values in predictions.items()}
    errors = {
        name: float(np.where(ended, np.abs(by), np.maximum(by, 0.0)).mean()) for name, by in short.items()
    }
    requests = samples.request[chosen]
    return ErrorRow(
        generated_from=low,
        generated_to=high,
        samples=int(chosen.sum()),
        requests=len(np.unique(requests)),
        cut_off=len(np.unique(requests[~ended])),
        mean_remaining=float(known.mean()),
        **errors,
    )


def _cost(predictor: Predictor, samples: Samples) -> Cost:
    """The median call, in this process, on the device where the weights are."""
    batch = max(1, round(samples.origin.batch))
    states = torch.from_numpy(np.resize(samples.hidden, (batch, samples.hidden_size)))
    seconds = []
    for _ in range(_WARM_UP + _TIMED):
        begun = time.perf_counter()
        predictor.remaining_on_device(states).tolist()
        seconds.append(time.perf_counter() - begun)
    return Cost(batch, float(np.median(seconds[_WARM_UP:])), samples.origin.step_s, INTERVAL_STEPS)
