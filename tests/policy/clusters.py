"""Random clusters with requests, for properties of policies.

Hypothesis draws the numbers of instances and requests, and a seed for everything else: hundreds of draws
per cluster would take longer than the tests themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from types import MappingProxyType

from hypothesis import strategies as st

from tailrace.cluster import (
    Arrival,
    ClusterView,
    InstanceState,
    InstanceView,
    Phase,
    Pool,
    RequestState,
    RequestView,
)
from tailrace.perf.horizon import FutureLoad
from tailrace.perf.remaining import expected_remaining

IDS = [f"w{n}" for n in range(6)]
# Active more often than not.
_STATES = [InstanceState.ACTIVE, InstanceState.ACTIVE, *InstanceState]
_RUNNING = [RequestState.RUNNING] * 4


def _length(random: Random) -> int:
    return random.randrange(random.choice([2, 400, 8_000]))


def _request(random: Random, request_id: str, instance_id: str) -> RequestView:
    prompt, output = random.randrange(1, 2_000), _length(random)
    return RequestView(
        request_id=request_id,
        instance_id=instance_id,
        phase=random.choice(list(Phase)),
        state=random.choice([*_RUNNING, *RequestState]),
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=random.choice([0, output + random.randrange(1, 400), 32_768]),
        kv_tokens=random.choice([0, prompt + output]),
        host_kv_tokens=random.choice([0, prompt + output]),
        migrating=random.random() < 0.2,
        pacer_slack_tokens=random.choice([None, 5.0, 5.0, 5.0, -1.0, random.uniform(-3.0, 20.0)]),
        predicted_remaining_tokens=random.choice([None, 0.0, random.random() * _length(random)]),
        phase_tokens=random.choice([0, 499, 500, output]),
        demoted=random.random() < 0.2,
    )


def _instance(random: Random, name: str, state: InstanceState, count: int) -> InstanceView:
    """Return an instance with `count` requests; each optional field of a report is set at random."""
    held = [_request(random, f"{name}-{n}", name) for n in range(count)]
    context = sum(r.context_tokens for r in held)
    capacity = context + _length(random) * random.choice([1, 3])
    host = _length(random)
    tokens = [(r.context_tokens, expected_remaining(r)) for r in held]
    return InstanceView(
        instance_id=name,
        state=state,
        pool=random.choice([None, None, None, *Pool]),
        kv_capacity_tokens=capacity,
        kv_used_tokens=random.choice([context, random.randint(0, capacity)]),
        max_model_len=random.choice([0, 4_096, 131_072]),
        running=sum(r.state is RequestState.RUNNING for r in held),
        waiting=sum(r.state is RequestState.WAITING for r in held),
        prefill_backlog_tokens=random.choice([0, _length(random)]),
        context_tokens=max(0, context + random.choice([0, 0, -300, 700])),
        token_interval_s=random.choice([0.0, 0.02]),
        host_kv_tokens=random.randint(0, host),
        host_kv_capacity_tokens=random.choice([0, host]),
        future_load=FutureLoad()(tokens) if random.random() < 0.5 else (),
        migrations_out=random.choice([0, 0, 0, 1]),
        migration_tokens_per_s=random.choice([None, 500.0, 5_000.0, 100_000.0]),
        requests=tuple(held),
    )


def random_cluster(counts: Sequence[int], seed: int, states: Sequence[InstanceState]) -> ClusterView:
    random = Random(seed)
    return ClusterView(
        MappingProxyType(
            {
                name: _instance(random, name, random.choice(states), count)
                for name, count in zip(IDS, counts, strict=False)
            }
        )
    )


def clusters(*, active: bool = False, least: int = 0) -> st.SearchStrategy[ClusterView]:
    """Return clusters of `least` to six instances in ID order, with up to six requests each.

    With `active`, all instances are active.
    """
    return st.builds(
        random_cluster,
        st.lists(st.integers(0, 6), min_size=least, max_size=len(IDS)),
        st.integers(0, 2**32),
        st.just([InstanceState.ACTIVE] if active else _STATES),
    )


arrivals = st.builds(
    Arrival,
    request_id=st.just("new"),
    prompt_tokens=st.integers(1, 10_000),
    max_tokens=st.integers(1, 10_000),
    seq=st.integers(0, 1_000),
    output_tokens=st.integers(0, 3_000),
    excluded=st.frozensets(st.sampled_from(IDS), max_size=4),
)
