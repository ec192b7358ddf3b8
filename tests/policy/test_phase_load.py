"""Incremental counts equal a full recount."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import Phase, RequestState, RequestView
from tailrace.policy.phase_load import PhaseCounts, phase_load

requests = st.builds(
    RequestView,
    request_id=st.just("r"),
    instance_id=st.just("a"),
    phase=st.sampled_from(Phase),
    state=st.sampled_from(RequestState),
    prompt_tokens=st.integers(1, 2),
    output_tokens=st.just(1),
    max_tokens=st.just(1),
    pacer_slack_tokens=st.none() | st.sampled_from([-2.0, 0.0, 3.0]),
    phase_tokens=st.sampled_from([0, 1, 199, 200, 499, 500]),
    demoted=st.booleans(),
)


@given(
    st.sampled_from([200, 500]),
    st.lists(requests, max_size=6),
    st.lists(st.tuples(st.booleans(), requests), max_size=20),
)
def test_incremental_counts_equal_a_recount(
    quantum: int, first: list[RequestView], changes: list[tuple[bool, RequestView]]
) -> None:
    counts, held = PhaseCounts(quantum), list(first)
    counts.reset(held)
    for removes, request in changes:
        if removes and held:
            counts.remove(held.pop(0))
        else:
            counts.add(request)
            held.append(request)
        assert counts.load(held) == phase_load(held, quantum_tokens=quantum)
        expected_prompts = [(r.arrival_s, r.prompt_tokens) for r in held if r.phase is Phase.PREFILL]
        assert sorted(counts.prompts()) == sorted(expected_prompts)
