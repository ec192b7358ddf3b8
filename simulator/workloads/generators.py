"""The workload generators by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from simulator.request import SimRequest
from simulator.workloads import ares, mixes, pascal, r1, sharegpt
from simulator.workloads.arrivals import gamma_requests, poisson_requests
from simulator.workloads.lengths import DrawLengths
from simulator.workloads.sessions import AGENTS, DOCUMENTS, Shape, session_requests


@dataclass(frozen=True, slots=True)
class Generator:
    """A distribution of lengths, with a one-line summary."""

    name: str
    lengths: DrawLengths
    summary: str
    # Coefficient of variation of the times between arrivals; 1: Poisson.
    arrival_cv: float = 1.0

    @property
    def arrivals(self) -> str:
        """Describe how requests arrive."""
        return "Poisson" if self.arrival_cv == 1.0 else f"in bursts (variation {self.arrival_cv:g})"

    def requests(self, count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
        """Generate `count` requests at `rate_per_s`. Raise WorkloadError for an invalid rate."""
        if self.arrival_cv == 1.0:
            return poisson_requests(self.name, self.lengths, count, rate_per_s, seed)
        return gamma_requests(self.name, self.lengths, count, rate_per_s, seed, self.arrival_cv)


@dataclass(frozen=True, slots=True)
class SessionGenerator:
    """A kind of sessions, with a one-line summary."""

    name: str
    shape: Shape
    summary: str

    @property
    def arrival_cv(self) -> float:
        """Return the coefficient of variation due to sessions: RMS of the turns over their mean."""
        return math.sqrt(2.0 * self.shape.turns - 1.0)

    @property
    def arrivals(self) -> str:
        """Describe how requests arrive."""
        return f"sessions Poisson, {self.shape.turns:g} turns each"

    def requests(self, count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
        """Generate `count` requests at `rate_per_s`. Raise WorkloadError for an invalid rate."""
        return session_requests(self.name, self.shape, count, rate_per_s, seed)


_ALL = (
    Generator("r1", r1.lengths, "a DeepSeek-R1 service, after ServeGen"),
    Generator("alpaca_eval", pascal.alpaca_eval, "AlpacaEval 2.0 to a reasoning model, after PASCAL"),
    Generator("arena_hard", pascal.arena_hard, "Arena-Hard to a reasoning model, after PASCAL"),
    Generator("math_gpqa_lcb", pascal.math_gpqa_lcb, "long reasoning, short answers, after PASCAL"),
    Generator("arena_hard_mixed", pascal.arena_hard_mixed, "half arena_hard, half math_gpqa_lcb"),
    Generator("reasoning_phase", pascal.reasoning_phase, "PASCAL's figure 4: only reasoning"),
    Generator("answering_phase", pascal.answering_phase, "PASCAL's figure 5: only answering"),
    Generator("sharegpt_ares", ares.SHAREGPT, "ShareGPT to R1-Distill-Qwen-7B, ARES's table 2"),
    Generator("alpaca_ares", ares.ALPACA, "Alpaca to R1-Distill-Qwen-7B, ARES's table 2"),
    Generator("sharegpt", sharegpt.first_turns, "ShareGPT, first turns"),
    Generator("sharegpt_turns", sharegpt.any_turns, "ShareGPT, any turn with its history"),
    Generator("code", mixes.CODE, "code completion, after the Azure trace of 2023"),
    Generator("mix", mixes.mix, "one third each of sharegpt_turns, code and r1"),
    Generator(
        "plain_mix",
        mixes.plain_mix,
        "one third each of summaries, chat and long writing; no reasoning, KV is scarce",
        mixes.PLAIN_MIX_ARRIVAL_CV,
    ),
)

GENERATORS: Mapping[str, Generator] = {generator.name: generator for generator in _ALL}

SESSIONS: Mapping[str, SessionGenerator] = {
    generator.name: generator
    for generator in (
        SessionGenerator("agent_sessions", AGENTS, "agents that call tools in loops"),
        SessionGenerator("document_sessions", DOCUMENTS, "conversations, most of them about documents"),
    )
}
