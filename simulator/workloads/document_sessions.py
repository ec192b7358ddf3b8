"""Conversations, two thirds of them about a document that other conversations are about, too.

- lengths: prompts of mean about 15,300 tokens and answers of mean 149, and two sessions in three about a long
  document, as in Mooncake's synthetic trace (Qin et al., "Mooncake", FAST'25, table 2: ShareGPT, L-Eval and
  LooGLE in equal parts). Messages have the mean of ShareGPT's (`sharegpt_ares`).
- turns: 3.5, on average 100 s apart, as in ServeGen's conversations (Xiang et al., arXiv 2505.09999).

The numbers of documents and applications and their popularity are assumptions. Elsewhere 62% to 66% of the
prompt tokens of such requests could be cached (Mooncake; Wang et al., "KVCache Cache in the Wild", ATC'25);
here, where documents recur, about 85%.
"""

from __future__ import annotations

from typing import Final

from simulator.request import SimRequest
from simulator.workloads.sessions import Shape, session_requests

NAME: Final = "document_sessions"
SHAPE: Final = Shape(
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


def generate(count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Generate `count` requests at `rate_per_s`."""
    return session_requests(NAME, SHAPE, count, rate_per_s, seed)
