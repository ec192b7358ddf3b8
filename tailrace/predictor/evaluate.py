"""Evaluate a predictor: its errors against two simpler ones, the calibration of its quantiles, and the cost
of a call.

Truncated requests are among those tested. Of them only a lower bound of the error is known: by how much the
prediction is below the tokens generated. Mean errors are therefore lower bounds wherever some requests were
truncated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tailrace.predictor.file import POINT, Predictor
from tailrace.predictor.network import quantile, widths_for
from tailrace.predictor.samples import Samples, Split
from tailrace.predictor.train import Epoch, TrainingOptions, train_on


class KaplanMeier:
    """The Kaplan-Meier estimate of a distribution from exact values (`ended`) and censored ones (lower
    bounds)."""

    def __init__(self, values: Values, ended: NDArray[np.bool_]) -> None:
        """Raise ValueError if no value is exact."""
        if not ended.any():
            raise ValueError("there is no exact value")
        self._at = np.unique(values[ended])
        ordered = np.sort(values)
        # All values not below it: a lower bound that equals an exact value is assumed to be larger.
        at_risk = len(values) - ordered.searchsorted(self._at, "left")
        ends = np.sort(values[ended])
        deaths = ends.searchsorted(self._at, "right") - ends.searchsorted(self._at, "left")
        self._survival = np.cumprod(1.0 - deaths / at_risk)

    def share_within(self, value: float) -> float:
        """Return the share of values that are at most `value`."""
        rank = int(self._at.searchsorted(value, "right"))
        return float(1.0 - self._survival[rank - 1]) if rank else 0.0

    def median_after(self, thresholds: Values) -> Values:
        """Return, for each of `thresholds`, the median of the values above it; the largest exact value if
        it is unknown."""
        rank = self._at.searchsorted(thresholds, "right")
        surviving = np.concatenate(([1.0], self._survival))[rank]
        # Survival decreases: search its negation, which increases.
        at = (-self._survival).searchsorted(-0.5 * surviving, "left")
        medians: Values = np.maximum(self._at[np.minimum(at, len(self._at) - 1)], thresholds)
        return medians


LEVELS: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantiles that are tested."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The share of samples whose remaining length was within the predicted quantile `level`.

    If the quantiles are calibrated, `share` equals `level`.
    """

    level: float
    share: float


def coverage(predictor: Predictor, samples: Samples) -> list[Coverage]:
    """Return the coverage of each of LEVELS, from the rank of each sample in its predicted distribution.

    A truncated sample's rank is known to be above that of the tokens that it generated. Raise ValueError if
    all samples were truncated.
    """
    ranks = KaplanMeier(predictor.share_within(samples.hidden, samples.remaining), samples.ended)
    return [Coverage(level, ranks.share_within(level)) for level in LEVELS]


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

    `cut_off` of the requests were truncated: their errors and remaining lengths are lower bounds.
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
    """The time of one call for `batch` states, and that of the engine's steps between two calls."""

    batch: int
    call_s: float
    step_s: float
    interval_steps: int

    @property
    def share(self) -> float:
        """Return the cost of a call as a share of the step time."""
        return self.call_s / (self.interval_steps * self.step_s)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Errors on requests that were not used in training.

    `same_requests` has only samples of the longest quarter of the test requests, so that its rows differ in
    the tokens generated and not in the requests; the paper's Figure 7 does the same.
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
    """Evaluate on the split's test part, against two baselines that are fitted to its training part.

    lengths_alone knows only how many tokens a request has generated, and predicts the median of the training
    requests that were longer. prompt_only is a network like the predictor's that gets only the state of the
    last prompt token, and predicts the median of such requests, given the tokens generated so far.
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
    """Predict the remaining lengths of the test samples from the lengths of the training requests."""
    first = split.training.first()
    known = KaplanMeier(first.remaining.astype(np.float64), first.ended)
    generated = split.test.generated.astype(np.float64)
    return known.median_after(generated) - generated


def _prompt_only(predictor: Predictor, split: Split) -> Values:
    """Predict the remaining lengths of the test samples from the prompt and the tokens generated so far."""
    prompts = split.training.first()
    # One sample per request is few: use smaller batches, and as many steps as the predictor may take. The
    # result then depends on initial weights and widths, so take the best of several by validation loss.
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
        generated = torch.from_numpy(test.generated).float()
        return np.asarray(quantile(hazards, network.edges, POINT, generated).numpy(), dtype=np.float64)


def _silent(_: Epoch) -> None:
    """Ignore the progress of training."""


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
    """Measure the median call in this process, on the device of the predictor's weights."""
    batch = max(1, round(samples.origin.batch))
    states = torch.from_numpy(np.resize(samples.hidden, (batch, samples.hidden_size)))
    seconds = []
    for _ in range(_WARM_UP + _TIMED):
        begun = time.perf_counter()
        predictor.remaining_on_device(states).tolist()
        seconds.append(time.perf_counter() - begun)
    return Cost(batch, float(np.median(seconds[_WARM_UP:])), samples.origin.step_s, INTERVAL_STEPS)
