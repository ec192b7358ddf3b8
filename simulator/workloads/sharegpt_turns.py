"""ShareGPT, any turn of a conversation: the prompt is the history and the new message.

CascadeInfer uses ShareGPT conversations, drops those longer than 128K tokens, and reports no lengths
(sections 2.2 and 6.1). Here a conversation continues after each turn with probability 0.73, since 73% of
ShareGPT's have several turns (Gao et al., "CachedAttention", USENIX ATC'24); a request is any turn of any
conversation with equal probability; messages and answers are those of `sharegpt`. That results in prompts of
mean about 2,000 tokens with a long tail, cut at 128K.
"""

from __future__ import annotations

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.arrivals import poisson_requests
from simulator.workloads.lengths import Lengths, tokens
from simulator.workloads.sharegpt import messages

NAME = "sharegpt_turns"
CONTINUE_PROBABILITY = 0.73
MAX_TOKENS = 131_072


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Draw the lengths of `count` requests."""
    # The turn of a request, from 1: geometric, like the number of turns of a conversation.
    turns = rng.geometric(1.0 - CONTINUE_PROBABILITY, size=count)
    message, answer = messages(int(turns.sum()), rng)
    last = turns.cumsum() - 1
    cumulative = np.concatenate([[0.0], (message + answer).cumsum()])
    history = cumulative[last] - cumulative[last - turns + 1]
    last_answer = tokens(answer[last])
    prompt = np.minimum(tokens(history + message[last]), MAX_TOKENS - last_answer)
    return Lengths(prompt, np.zeros(count, np.int64), last_answer)


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Generate `count` requests at `rate_per_s`."""
    return poisson_requests(NAME, lengths, count, rate_per_s, seed)
