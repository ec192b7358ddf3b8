"""Several kinds of requests in one stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.workloads.lengths import DrawLengths, Lengths


def blend(parts: Sequence[tuple[float, DrawLengths]], count: int, rng: np.random.Generator) -> Lengths:
    """Lengths of `count` requests, each of a kind with its probability (they add up to 1)."""
    which = rng.choice(len(parts), size=count, p=[share for share, _ in parts])
    prompt, reasoning, answer = (np.zeros(count, np.int64) for _ in range(3))
    for index, (_, draw) in enumerate(parts):
        mine = which == index
        drawn = draw(int(mine.sum()), rng)
        prompt[mine], reasoning[mine], answer[mine] = drawn.prompt, drawn.reasoning, drawn.answer
    return Lengths(prompt, reasoning, answer)
