"""Samples whose remaining length can be read off the state, made by a seed."""

import numpy as np

from tailrace.predictor.samples import FORMAT, Origin, Samples

ORIGIN = Origin(FORMAT, "synthetic", interval=20, step_s=0.01, batch=8.0)
HIDDEN = 8


def samples(requests: int, seed: int, noise: float = 0.05) -> Samples:
    """Every state tells, with noise, how much is left; the prompt's state tells less than later ones."""
    draw = np.random.default_rng(seed)
    mixing = np.random.default_rng(0).normal(size=(2, HIDDEN))
    hidden, request, generated, remaining = [], [], [], []
    for number in range(requests):
        length = int(draw.integers(20, 400))
        for at in range(0, length, 20):
            seen = (length - at) / 100 + draw.normal() * noise * (20 if at == 0 else 1)
            hidden.append(np.array([seen, draw.normal()]) @ mixing)
            request.append(number * 3)
            generated.append(at)
            remaining.append(length - at)
    columns = (np.array(values, dtype=np.int32) for values in (request, generated, remaining))
    return Samples(ORIGIN, np.array(hidden, dtype=np.float32), *columns)
