"""Sessions: requests whose prompts begin with earlier turns, and with text that other sessions share.

A session belongs to one application, whose instructions and tools begin every prompt; some sessions are about
a document of a shared collection. Applications and documents have a Zipf popularity. Each turn adds a message
or a tool's result, and the answer to it; the next turn follows after a gap in which a user reads or a tool
runs. Sessions begin as a Poisson process, and many are in progress when the workload begins. Arrivals do not
wait for answers, which are assumed to take a constant time per token.

Prompts and answers are named in units, so that equal text can be found in caches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from simulator.request import SimRequest
from simulator.workloads.arrivals import check_rate
from simulator.workloads.lengths import lognormal_of_mean, tokens

UNIT_TOKENS: Final = 64
MAX_TOKENS: Final = 131_072
# Assumed seconds per token of an answer.
PACE_S: Final = 0.02
# Simulated time before the workload begins, in mean session lifetimes.
_WARM_UP_LIFETIMES: Final = 4.0
# Spread of lengths whose mean alone is known: standard deviation equal to the mean, as in `sharegpt`.
_SIGMA: Final = 0.8326
# Bits that number the units of one session, document or application.
_UNITS_BITS: Final = 20


@dataclass(frozen=True, slots=True)
class Shape:
    """Statistics of sessions. Lengths are means in tokens of lognormal distributions."""

    # Geometric, at least one.
    turns: float
    # Seconds from the end of an answer to the next turn; lognormal, `gap_sigma` is that of the logarithm.
    gap_s: float
    gap_sigma: float
    apps: int
    instruction_tokens: float
    first_tokens: float
    later_tokens: float
    answer_tokens: float
    # Number of documents, and share of sessions that are about one.
    documents: int = 0
    document_share: float = 0.0
    document_tokens: float = 0.0
    # The n-th most popular application or document has a share proportional to n ** -zipf.
    zipf: float = 1.0


AGENTS: Final = Shape(
    turns=8.0,
    gap_s=2.0,
    gap_sigma=1.2,
    apps=20,
    instruction_tokens=2_500.0,
    first_tokens=1_000.0,
    later_tokens=550.0,
    answer_tokens=182.0,
)
"""Agents: loops of calls, each with the result of the last tool, after instructions shared by runs of an
agent.

- lengths: prompts of mean about 8,600 tokens and answers of mean 182, as in Mooncake's tool and agent trace
  (Qin et al., "Mooncake", FAST'25, table 2). In that trace 59% of the prompt tokens could be cached; in these
  loops, which are long, about 90%.
- calls per loop: 8; the tools that Abhyankar et al. studied are called 3 to 28 times per request on average
  ("InferCept", ICML'24).
- gap: a tool takes some seconds (InferCept: calculators take less than one, generators of speech or images
  twenty times as long); mean 2 s.

The number of agents, their popularity, and the division of a prompt into instructions, task and results are
assumptions.
"""

DOCUMENTS: Final = Shape(
    turns=3.5,
    gap_s=100.0,
    gap_sigma=0.8326,
    apps=10,
    instruction_tokens=500.0,
    first_tokens=305.0,
    later_tokens=305.0,
    answer_tokens=149.0,
    documents=3_000,
    document_share=2.0 / 3.0,
    document_tokens=20_000.0,
    zipf=0.8,
)
"""Conversations, two thirds of them about a document that other conversations are about, too.

- lengths: prompts of mean about 15,300 tokens and answers of mean 149, and two sessions in three about a long
  document, as in Mooncake's synthetic trace (Qin et al., "Mooncake", FAST'25, table 2: ShareGPT, L-Eval and
  LooGLE in equal parts). Messages have the mean of ShareGPT's (`ares`).
- turns: 3.5, on average 100 s apart, as in ServeGen's conversations (Xiang et al., arXiv 2505.09999).

The numbers of documents and applications and their popularity are assumptions. Elsewhere 62% to 66% of the
prompt tokens of such requests could be cached (Mooncake; Wang et al., "KVCache Cache in the Wild", ATC'25);
here, where documents recur, about 85%.
"""


class _Library:
    """Applications and documents with their popularity."""

    def __init__(self, shape: Shape, rng: np.random.Generator) -> None:
        self._shape = shape
        self.instructions = tokens(lognormal_of_mean(shape.instruction_tokens, _SIGMA, shape.apps, rng))
        lengths = lognormal_of_mean(max(1.0, shape.document_tokens), _SIGMA, shape.documents, rng)
        self.documents = tokens(lengths)
        self._app_shares = _zipf(shape.apps, shape.zipf)
        self._document_shares = _zipf(shape.documents, shape.zipf)

    def draw(self, rng: np.random.Generator) -> tuple[int, int | None]:
        """Draw a session's application, and its document or None; each document belongs to one
        application."""
        shape = self._shape
        if shape.documents and rng.random() < shape.document_share:
            document = int(rng.choice(shape.documents, p=self._document_shares))
            return document % shape.apps, document
        return int(rng.choice(shape.apps, p=self._app_shares)), None


def _zipf(count: int, exponent: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum() if count else weights


def session_requests(name: str, shape: Shape, count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Generate the first `count` requests at a mean rate of `rate_per_s`. Raise WorkloadError for an invalid
    rate."""
    check_rate(count, rate_per_s)
    library_rng, times_rng, rng = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3))
    library = _Library(shape, library_rng)
    lifetime_s = shape.turns * (shape.gap_s + PACE_S * shape.answer_tokens)
    begin_s, number = -_WARM_UP_LIFETIMES * lifetime_s, 0
    requests: list[SimRequest] = []
    # Turns of sessions that have begun, by time.
    upcoming: list[tuple[float, int, SimRequest]] = []
    while len(requests) < count:
        begin_s += times_rng.standard_exponential() * shape.turns / rate_per_s
        while upcoming and upcoming[0][0] <= begin_s and len(requests) < count:
            requests.append(heapq.heappop(upcoming)[2])
        for request in _session(name, shape, library, number, begin_s, rng):
            heapq.heappush(upcoming, (request.arrival_s, number, request))
        number += 1
    return requests


def _session(
    name: str, shape: Shape, library: _Library, number: int, begin_s: float, rng: np.random.Generator
) -> Iterator[SimRequest]:
    """Yield the session's turns after the start of the workload."""
    app, document = library.draw(rng)
    turns = int(rng.geometric(1.0 / shape.turns))
    first = lognormal_of_mean(shape.first_tokens, _SIGMA, 1, rng)
    messages = tokens(np.concatenate([first, lognormal_of_mean(shape.later_tokens, _SIGMA, turns - 1, rng)]))
    answers = tokens(lognormal_of_mean(shape.answer_tokens, _SIGMA, turns, rng))
    gaps = lognormal_of_mean(shape.gap_s, shape.gap_sigma, turns, rng)
    instruction_end = int(library.instructions[app])
    document_end = instruction_end + (0 if document is None else int(library.documents[document]))
    prompt, at_s = document_end, begin_s
    for turn in range(turns):
        prompt += int(messages[turn])
        answer = int(answers[turn])
        if prompt + answer > MAX_TOKENS:
            return
        if at_s >= 0.0:
            ends = ((app, instruction_end), (shape.apps + (document or 0), document_end))
            owner = shape.apps + shape.documents + number
            yield SimRequest(
                request_id=f"{name}-{number}-{turn}",
                arrival_s=at_s,
                prompt_tokens=prompt,
                reasoning_tokens=0,
                answer_tokens=answer,
                unit_names=_names(prompt + answer, ends, owner),
                unit_tokens=UNIT_TOKENS,
                session_id=f"{name}-{number}",
            )
        prompt += answer
        at_s += PACE_S * answer + float(gaps[turn])


def _names(total: int, ends: tuple[tuple[int, int], ...], owner: int) -> tuple[int, ...]:
    """Name units by the shared part in which they end, or by the session if they end beyond all parts."""
    names: list[int] = []
    for unit in range(total // UNIT_TOKENS):
        end = (unit + 1) * UNIT_TOKENS
        name = next((part for part, part_end in ends if end <= part_end), owner)
        names.append(name << _UNITS_BITS | unit)
    return tuple(names)
