"""ShareGPT: a user's messages and the answers of a model that does not reason.

- message: the quantiles of ARES's table 2 (mean 305, P50 36, P90 920, P95 1609), see `ares`.
- answer: mean 338 tokens, as vLLM's paper gives it (Kwon et al., SOSP'23, section 6.1); lognormal with a
  standard deviation equal to the mean, which is an assumption.

Drawn independently.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.workloads import ares
from simulator.workloads.lengths import Lengths, lognormal_of_mean, tokens

ANSWER_MEAN = 338.0
# Sigma of the logarithm; the square root of ln 2 makes the standard deviation equal to the mean.
ANSWER_SIGMA = 0.8326
CONTINUE_PROBABILITY = 0.73
MAX_TOKENS = 131_072


def first_turns(count: int, rng: np.random.Generator) -> Lengths:
    """Draw the lengths of opening messages and their answers."""
    prompt, answer = _messages(count, rng)
    return Lengths(tokens(prompt), np.zeros(count, np.int64), tokens(answer))


def any_turns(count: int, rng: np.random.Generator) -> Lengths:
    """Draw the lengths of any turns of conversations: the prompt is the history and the new message.

    CascadeInfer uses ShareGPT conversations, drops those longer than 128K tokens, and reports no lengths
    (sections 2.2 and 6.1). Here a conversation continues after each turn with probability 0.73, since 73% of
    ShareGPT's have several turns (Gao et al., "CachedAttention", USENIX ATC'24); a request is any turn of any
    conversation with equal probability. That results in prompts of mean about 2,000 tokens with a long tail,
    cut at 128K.
    """
    # The turn of a request, from 1: geometric, like the number of turns of a conversation.
    turns = rng.geometric(1.0 - CONTINUE_PROBABILITY, size=count)
    message, answer = _messages(int(turns.sum()), rng)
    last = turns.cumsum() - 1
    cumulative = np.concatenate([[0.0], (message + answer).cumsum()])
    history = cumulative[last] - cumulative[last - turns + 1]
    last_answer = tokens(answer[last])
    prompt = np.minimum(tokens(history + message[last]), MAX_TOKENS - last_answer)
    return Lengths(prompt, np.zeros(count, np.int64), last_answer)


def _messages(count: int, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw the lengths of `count` user messages and of their answers."""
    return ares.SHAREGPT.prompt.sample(count, rng), lognormal_of_mean(ANSWER_MEAN, ANSWER_SIGMA, count, rng)
