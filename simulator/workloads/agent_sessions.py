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

from __future__ import annotations

from typing import Final

from simulator.request import SimRequest
from simulator.workloads.sessions import Shape, session_requests

NAME: Final = "agent_sessions"
SHAPE: Final = Shape(
    turns=8.0,
    gap_s=2.0,
    gap_sigma=1.2,
    apps=20,
    instruction_tokens=2_500.0,
    first_tokens=1_000.0,
    later_tokens=550.0,
    answer_tokens=182.0,
)


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Generate `count` requests at `rate_per_s`."""
    return session_requests(NAME, SHAPE, count, rate_per_s, seed)
