"""Random samples whose remaining length follows from the state."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.predictor.samples import FORMAT, Origin, Samples

ORIGIN = Origin(FORMAT, "synthetic", interval=20, step_s=0.01, batch=8.0)
HIDDEN = 8


def samples(requests: int, seed: int, noise: float = 0.05) -> Samples:
    """Return samples whose states contain the remaining length with noise, more so for prompts."""
    draw = np.random.default_rng(seed)
    mixing = np.random.default_rng(0).normal(size=(2, HIDDEN))
    hidden, request, generated, remaining, ended = [], [], [], [], []
    for number in range(requests):
        length = int(draw.integers(20, 400))
        for at in range(0, length, 20):
            seen = (length - at) / 100 + draw.normal() * noise * (20 if at == 0 else 1)
            hidden.append(np.array([seen, draw.normal()]) @ mixing)
            request.append(number * 3)
            generated.append(at)
            remaining.append(length - at)
            ended.append(True)
    return Samples(
        ORIGIN,
        np.array(hidden, dtype=np.float32),
        np.array(request, dtype=np.int32),
        np.array(generated, dtype=np.int32),
        np.array(remaining, dtype=np.int32),
        np.array(ended),
    )


@dataclass(frozen=True)
class Truth:
    """Samples cut off at a limit, with the mean of the exponential distribution of each remaining length."""

    samples: Samples
    mean: NDArray[np.float64]


def cut_off(requests: int, seed: int, max_tokens: int) -> Truth:
    """Return samples in which the first number of a state gives the exact scale of the request's length.

    Scales are from 100 to 1,600 tokens: with max_tokens 400, a third of the requests are cut off.
    """
    draw = np.random.default_rng(seed)
    hidden, request, generated, remaining, ended, mean = [], [], [], [], [], []
    for number in range(requests):
        scale = 100.0 * 2.0 ** draw.uniform(0.0, 4.0)
        length = max(1, round(draw.exponential(scale)))
        kept = min(length, max_tokens)
        for at in range(0, kept, 40):
            hidden.append([np.log2(scale / 400.0), *draw.normal(size=HIDDEN - 1)])
            request.append(number)
            generated.append(at)
            remaining.append(kept - at)
            ended.append(length <= max_tokens)
            mean.append(scale)
    found = Samples(
        ORIGIN,
        np.array(hidden, dtype=np.float32),
        np.array(request, dtype=np.int32),
        np.array(generated, dtype=np.int32),
        np.array(remaining, dtype=np.int32),
        np.array(ended),
    )
    return Truth(found, np.array(mean))
