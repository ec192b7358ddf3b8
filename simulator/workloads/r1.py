"""Requests to a DeepSeek-R1 service, after the distributions published by ServeGen.

Source: Y. Xiang et al., "ServeGen: Workload Characterization and Generation of Large Language Model Serving
in Production", arXiv:2505.09999; data `data/reason/deepseek-r1` of https://github.com/alibaba/ServeGen,
Apache-2.0. The data here are quantiles, derived by `scripts/derive_servegen.py`: one set for each of the
largest clients in each quarter of the day, and a few for all others. Within a client prompt, output and the
share of reasoning are drawn independently, as ServeGen does; between clients they are correlated. Arrivals
are Poisson, unlike ServeGen's bursty clients. Prompts are counted by the service's own tokenizer and have up
to 60K tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from simulator.workloads.lengths import Lengths, QuantileTable, Tokens, tokens


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the service: its share of all requests, and their distributions."""

    weight: float
    prompt_tokens: QuantileTable
    output_tokens: QuantileTable
    reasoning_share: QuantileTable


@cache
def clients() -> tuple[Client, ...]:
    """Return the clients with the quantiles in the data file."""
    data = json.loads((files("simulator.workloads") / "data" / "servegen_r1.json").read_text())
    shares = tuple(float(share) for share in data["shares"])

    def table(values: list[float]) -> QuantileTable:
        return QuantileTable(shares, tuple(float(value) for value in values))

    return tuple(
        Client(
            weight=float(entry["weight"]),
            prompt_tokens=table(entry["prompt_tokens"]),
            output_tokens=table(entry["output_tokens"]),
            reasoning_share=table(entry["reasoning_share"]),
        )
        for entry in data["components"]
    )


def lengths(count: int, rng: np.random.Generator) -> Lengths:
    """Draw the lengths of `count` requests, each with at least one token of reasoning and of answer."""
    population = clients()
    weights = np.array([client.weight for client in population])
    chosen = rng.choice(len(population), size=count, p=weights / weights.sum())
    shares = rng.random((3, count))
    prompt, output, reasoning = (np.empty(count) for _ in range(3))
    for index, client in enumerate(population):
        of_client = chosen == index
        prompt[of_client] = client.prompt_tokens.at(shares[0, of_client])
        output[of_client] = client.output_tokens.at(shares[1, of_client])
        reasoning[of_client] = client.reasoning_share.at(shares[2, of_client])
    total: Tokens = tokens(output, least=2)
    thought = np.clip(tokens(total * reasoning), 1, total - 1)
    return Lengths(tokens(prompt), thought, total - thought)
