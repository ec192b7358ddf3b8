"""Sessions: equal units have equal names, and lengths match the published ones."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from simulator.request import SimRequest
from simulator.workloads.base import WorkloadError
from simulator.workloads.generators import SESSIONS
from simulator.workloads.resolve import WorkloadOptions, resolve_workload
from simulator.workloads.sessions import PACE_S, UNIT_TOKENS


@pytest.fixture(scope="module", params=SESSIONS)
def generated(request: pytest.FixtureRequest) -> tuple[str, list[SimRequest]]:
    """Return a generator's name and enough requests for means."""
    return request.param, SESSIONS[request.param].requests(3_000, 4.0, 2)


def by_session(requests: list[SimRequest]) -> list[list[SimRequest]]:
    """Return the turns of each session whose first turn is included."""
    sessions: dict[str, list[SimRequest]] = defaultdict(list)
    for each in requests:
        sessions[each.session_id].append(each)
    return [turns for turns in sessions.values() if turns[0].request_id.endswith("-0")]


@pytest.mark.parametrize("name", SESSIONS)
def test_sessions_are_in_order_and_depend_only_on_the_seed(name: str) -> None:
    requests = SESSIONS[name].requests(500, 2.0, seed=3)
    assert requests == SESSIONS[name].requests(500, 2.0, seed=3)
    assert requests != SESSIONS[name].requests(500, 2.0, seed=4)
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    assert len({r.request_id for r in requests}) == 500
    assert max(r.prompt_tokens + r.output_tokens for r in requests) <= 131_072


def test_a_turn_begins_with_the_whole_previous_turn(generated: tuple[str, list[SimRequest]]) -> None:
    for turns in by_session(generated[1]):
        for before, after in pairwise(turns):
            previous_tokens = before.prompt_tokens + before.answer_tokens
            assert after.prompt_tokens > previous_tokens
            assert after.unit_names[: previous_tokens // UNIT_TOKENS] == before.unit_names
            assert after.arrival_s > before.arrival_s + PACE_S * before.answer_tokens


def test_a_unit_name_identifies_the_whole_prefix(generated: tuple[str, list[SimRequest]]) -> None:
    preceding: dict[int, int] = {}
    for each in generated[1]:
        assert len(each.unit_names) == (each.prompt_tokens + each.answer_tokens) // UNIT_TOKENS
        for before, name in zip((-1, *each.unit_names), each.unit_names, strict=False):
            assert preceding.setdefault(name, before) == before


def test_sessions_share_instructions_and_documents(generated: tuple[str, list[SimRequest]]) -> None:
    name, requests = generated
    holders: dict[int, set[str]] = defaultdict(set)
    for turns in by_session(requests):
        for unit in turns[0].unit_names:
            holders[unit].add(turns[0].session_id)
    shared = [len(sessions) for sessions in holders.values() if len(sessions) > 1]
    shape = SESSIONS[name].shape
    assert len(shared) >= shape.apps
    # The first message of a session is not shared.
    assert sum(len(sessions) == 1 for sessions in holders.values()) > len(shared) / 10


# Mooncake, FAST'25, table 2: mean prompt and answer.
@pytest.mark.parametrize(
    ("name", "published"), [("agent_sessions", (8_596, 182)), ("document_sessions", (15_325, 149))]
)
def test_lengths_have_the_published_means(name: str, published: tuple[float, float]) -> None:
    requests = [each for seed in range(4) for each in SESSIONS[name].requests(1_500, 8.0, seed)]
    prompt, answer = (
        np.mean([r.prompt_tokens for r in requests]),
        np.mean([r.answer_tokens for r in requests]),
    )
    assert (prompt, answer) == pytest.approx(published, rel=0.1)


def test_turns_and_rate_are_as_requested(generated: tuple[str, list[SimRequest]]) -> None:
    name, requests = generated
    assert len(requests) / requests[-1].arrival_s == pytest.approx(4.0, rel=0.15)
    # Sessions that began early enough to have ended.
    early = [turns for turns in by_session(requests) if turns[0].arrival_s < 0.2 * requests[-1].arrival_s]
    assert np.mean([len(turns) for turns in early]) == pytest.approx(SESSIONS[name].shape.turns, rel=0.15)


def test_invalid_rates_are_errors() -> None:
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(WorkloadError, match="rate must be"):
            SESSIONS["agent_sessions"].requests(5, rate, seed=0)


def test_session_generators_are_found_by_name() -> None:
    workload = resolve_workload("agent_sessions", WorkloadOptions(rate_per_s=4.0, duration_s=30.0))
    assert workload.requests[-1].arrival_s <= 30.0
    assert workload.requests == SESSIONS["agent_sessions"].requests(len(workload.requests), 4.0, 0)
