"""The simulated prefix cache has the same hits as real vLLM's."""

from __future__ import annotations

import pytest

from experiments.cache.against_vllm import compare, token_additions, workload
from simulator.workloads.sessions import UNIT_TOKENS


def test_equal_units_are_equal_tokens_and_all_others_differ() -> None:
    requests = workload(200, 5)
    context_tokens: dict[str, list[int]] = {}
    of_name: dict[int, tuple[int, ...]] = {}
    for each, (session, added, answer) in zip(requests, token_additions(requests), strict=True):
        prompt = context_tokens.get(session, []) + added
        assert len(prompt) == each.prompt_tokens and added
        for place, name in enumerate(each.unit_names[: each.prompt_tokens // UNIT_TOKENS]):
            unit = tuple(prompt[place * UNIT_TOKENS : (place + 1) * UNIT_TOKENS])
            assert of_name.setdefault(name, unit) == unit
        # Generated tokens are unique to the session.
        context_tokens[session] = prompt + [-1] * answer
    assert len(set(of_name.values())) > 0.9 * len(of_name)


# 90 s on two cores; `python -m experiments.cache.against_vllm` runs the whole benchmark.
@pytest.mark.slow
@pytest.mark.vllm
def test_sequential_hits_equal_those_of_vllm_and_batched_ones_within_two_points() -> None:
    alone, together = compare(60, 1, UNIT_TOKENS)
    assert 0.1 < alone.vllm < alone.unbounded - 0.1
    assert alone.equal == alone.requests
    assert together.simulated == pytest.approx(together.vllm, abs=0.02)
