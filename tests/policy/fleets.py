"""Random clusters whose counts agree with their requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import MappingProxyType

from hypothesis import HealthCheck, settings
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
    Stage,
)

MAX_LENGTH = 131_072
# A machine with other load is slow now and then.
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def instance(
    name: str,
    requests: tuple[RequestView, ...] = (),
    *,
    pool: Pool | None = None,
    state: InstanceState = InstanceState.ACTIVE,
    capacity: int = 400_000,
    token_interval_s: float = 0.02,
    migrations: tuple[int, int] = (0, 0),
) -> InstanceView:
    """Return an instance with these requests: those in prefill wait, the others run."""
    waiting = [r for r in requests if r.phase is Phase.PREFILL]
    return InstanceView(
        instance_id=name,
        state=state,
        pool=pool,
        kv_capacity_tokens=capacity,
        kv_used_tokens=min(capacity, sum(r.kv_tokens for r in requests)),
        max_model_len=MAX_LENGTH,
        running=len(requests) - len(waiting),
        waiting=len(waiting),
        prefill_backlog_tokens=sum(r.context_tokens for r in waiting),
        context_tokens=sum(r.context_tokens for r in requests),
        token_interval_s=token_interval_s,
        migrations_in=migrations[0],
        migrations_out=migrations[1],
        requests=requests,
    )


def request(
    name: str,
    where: str,
    prompt: int = 1_000,
    output: int = 100,
    phase: Phase = Phase.ANSWERING,
    migrating: bool = False,
) -> RequestView:
    """Return a request; one in prefill holds no KV yet."""
    prefilling = phase is Phase.PREFILL
    context = prompt + (0 if prefilling else output)
    return RequestView(
        request_id=name,
        instance_id=where,
        phase=phase,
        state=RequestState.WAITING if prefilling else RequestState.RUNNING,
        prompt_tokens=prompt,
        output_tokens=context - prompt,
        max_tokens=32_768,
        kv_tokens=0 if prefilling else -(-context // 16) * 16,
        migrating=migrating,
    )


def cluster(*members: InstanceView, stages: tuple[Stage, ...] = ()) -> ClusterView:
    """Return a view of these instances."""
    ordered = sorted(members, key=lambda i: i.instance_id)
    return ClusterView(MappingProxyType({i.instance_id: i for i in ordered}), stages)


def fleets(
    least: int = 1,
    pools: Sequence[Pool | None] = (None,),
    all_active: bool = False,
    staged: bool = False,
) -> st.SearchStrategy[ClusterView]:
    """Return clusters of up to seven instances, each with up to eight requests.

    Hypothesis draws a seed: hundreds of draws per example would take longer than the code under test.
    """
    states = (InstanceState.ACTIVE,) if all_active else (InstanceState.ACTIVE, *InstanceState)

    def build(count: int, most_requests: int, seed: int) -> ClusterView:
        rng = random.Random(seed)
        members = [_random_instance(rng, f"w{n}", most_requests, pools, states) for n in range(count)]
        stages = random_layout(rng, [m.instance_id for m in members]) if staged else ()
        return cluster(*members, stages=stages)

    return st.builds(build, st.integers(least, 7), st.integers(0, 8), st.integers(0, 2**32))


def _random_instance(
    rng: random.Random,
    name: str,
    most_requests: int,
    pools: Sequence[Pool | None],
    states: Sequence[InstanceState],
) -> InstanceView:
    longest = rng.choice((100, 5_000, 60_000))
    held = tuple(
        request(
            f"{name}-{index}",
            name,
            rng.randint(1, longest),
            rng.randint(1, longest),
            rng.choice((*Phase, Phase.ANSWERING)),
            rng.random() < 0.15,
        )
        for index in range(rng.randint(0, most_requests))
    )
    return instance(
        name,
        held,
        pool=rng.choice(pools),
        state=rng.choice(states),
        capacity=sum(r.kv_tokens for r in held) + rng.choice((0, 100, 5_000, 60_000, 500_000)),
        token_interval_s=rng.choice((0.0, 0.02, 0.1, 0.3)),
        migrations=(rng.choice((0, 0, 1, 3)), rng.choice((0, 0, 1, 3))),
    )


def random_layout(rng: random.Random, names: Sequence[str]) -> tuple[Stage, ...]:
    """Return stages that cover all lengths and all of these instances."""
    count = rng.randint(1, len(names))
    cuts = [0, *sorted(rng.sample(range(1, 60_000), count - 1)), MAX_LENGTH]
    parts = [0, *sorted(rng.sample(range(1, len(names)), count - 1)), len(names)]
    return tuple(
        Stage(cuts[at], cuts[at + 1], tuple(names[parts[at] : parts[at + 1]])) for at in range(count)
    )


arrivals = st.builds(
    Arrival,
    request_id=st.just("new"),
    prompt_tokens=st.integers(1, 100_000),
    max_tokens=st.integers(1, 10_000),
    seq=st.integers(0, 1_000),
    output_tokens=st.integers(0, 1_000),
    excluded=st.frozensets(st.sampled_from([f"w{n}" for n in range(7)]), max_size=2),
)
