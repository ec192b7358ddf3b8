"""Properties of all intra-instance policies, and the purpose of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Phase
from tailrace.intra.base import IntraPolicy, JobView
from tailrace.intra.earliest_due import EarliestDue
from tailrace.intra.orders import DecodeFirst, Fcfs, QuantumRoundRobin
from tailrace.intra.pascal import PascalQueue

POLICIES: dict[str, IntraPolicy] = {
    "fcfs": Fcfs(),
    "decode_first": DecodeFirst(),
    "round_robin": QuantumRoundRobin(),
    "pascal": PascalQueue(),
    "pascal_never_demotes": PascalQueue(demotion_tokens=None),
    "earliest_due": EarliestDue(),
}


@st.composite
def jobs(draw: st.DrawFn) -> JobView:
    prompt = draw(st.integers(1, 8_000))
    reasoning = draw(st.sampled_from([0, 1, 300, 499, 500, 501, 4_990, 9_000]))
    generated = draw(st.integers(0, 10_000))
    phase = Phase.PREFILL if not generated else Phase.REASONING if generated < reasoning else Phase.ANSWERING
    in_phase = generated - reasoning if phase is Phase.ANSWERING else generated
    arrived_s = draw(st.floats(0.0, 2e9))
    answering_s = arrived_s + draw(st.floats(0.0, 1e3))
    return JobView(
        draw(st.integers(0, 1_000)),
        phase,
        prompt,
        generated,
        in_phase,
        arrived_s,
        0.0,
        answering_s,
        draw(st.booleans()),
    )


def grown(job: JobView, by: int) -> JobView:
    return replace(job, output_tokens=job.output_tokens + by, phase_tokens=job.phase_tokens + by)


@pytest.mark.parametrize("name", POLICIES)
@given(job=jobs())
def test_a_rank_holds_exactly_as_long_as_predicted(name: str, job: JobView) -> None:
    policy = POLICIES[name]
    rank = policy.rank(job)
    assert rank[-1] == job.arrival
    if job.phase is Phase.PREFILL:
        return
    holds = policy.rank_holds(job)
    if holds is None:
        assert policy.rank(grown(job, 100_000)) == rank
        return
    assert holds >= 1
    assert policy.rank(grown(job, holds - 1)) == rank
    # Growth never improves a rank.
    assert policy.rank(grown(job, holds)) > rank


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("step", "decoding", "prompt_tokens"), [(512, 0, 512), (512, 200, 312), (512, 512, 0), (512, 513, 0)]
)
def test_decodes_take_their_tokens_of_a_step_first(
    name: str, step: int, decoding: int, prompt_tokens: int
) -> None:
    assert POLICIES[name].prefill_budget(step, decoding) == prompt_tokens


def test_round_robin_prefers_fewer_quanta_in_any_phase() -> None:
    policy = QuantumRoundRobin(quantum_tokens=500)
    early_answering = JobView(9, Phase.ANSWERING, 10, 499, 450)
    long_reasoning = JobView(1, Phase.REASONING, 10, 1_000, 1_000)
    assert policy.rank(early_answering) < policy.rank(long_reasoning)
    assert policy.rank(early_answering) == (0, 9)


def test_pascal_puts_reasoning_above_answering_until_it_is_demoted() -> None:
    policy = PascalQueue()
    fresh_answer = JobView(0, Phase.ANSWERING, 100, 3_000, 0)
    reasoning = JobView(1, Phase.REASONING, 100, 4_900, 4_900)
    assert policy.rank(reasoning) < policy.rank(fresh_answer)
    assert not policy.demoted(reasoning)
    beyond = JobView(1, Phase.REASONING, 100, 4_901, 4_901)
    assert policy.demoted(beyond)
    # It ranks like an answering request in its first quantum.
    assert policy.rank(beyond) == (1, 0, 1)
    assert policy.rank(fresh_answer) < policy.rank(beyond)


@pytest.mark.parametrize("prompt", [5_001, 9_000])
def test_pascal_counts_quanta_of_a_demoted_prompt_from_its_first_token(prompt: int) -> None:
    policy = PascalQueue()
    last_of_first, first_of_second = (JobView(0, Phase.REASONING, prompt, n, n) for n in (499, 500))
    assert policy.rank(last_of_first) == (1, 0, 0)
    assert policy.rank_holds(last_of_first) == 1
    assert policy.rank(first_of_second) == (1, 1, 0)


def test_pascal_does_not_demote_a_long_prompt_before_reasoning() -> None:
    policy = PascalQueue()
    assert policy.rank(JobView(0, Phase.PREFILL, 6_000, 0, 0)) == (0, 0, 0)


def test_only_pascal_accepts_migrations_into_host_memory() -> None:
    """Answers spill to host memory (Algorithm 2); with other policies a migration waits for room."""
    assert {name for name, each in POLICIES.items() if each.receives_on_host} == {
        "pascal",
        "pascal_never_demotes",
    }


def test_decode_first_ranks_prompts_last() -> None:
    policy = DecodeFirst()
    assert policy.rank(JobView(9, Phase.ANSWERING, 10, 1, 1)) < policy.rank(
        JobView(1, Phase.PREFILL, 10, 0, 0)
    )


@pytest.mark.parametrize("make", [QuantumRoundRobin, PascalQueue])
def test_a_quantum_has_at_least_one_token(make: type[QuantumRoundRobin]) -> None:
    with pytest.raises(ValueError, match="quantum"):
        make(quantum_tokens=0)
