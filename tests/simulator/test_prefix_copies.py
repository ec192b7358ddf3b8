"""Copies in advance in the simulator: a burst of requests about one document."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from simulator.cluster import ClusterSpec
from simulator.records import SimResult
from simulator.request import SimRequest
from simulator.simulation import simulate
from tailrace.actions import Action, CopyPrefix, Place, Placement
from tailrace.cluster import Arrival, ClusterView
from tailrace.intra.earliest_due import EarliestDue
from tailrace.policy.base import Policy
from tailrace.policy.tailrace.policy import Tailrace
from tailrace.profiles import load_profile

PROFILE = load_profile("llama-3.1-8b-h100")
UNIT = 64
DOCUMENT = tuple(range(300))


def question(number: int, at_s: float, answer: int = 60) -> SimRequest:
    """Return a request about the document."""
    names = (*DOCUMENT, 10_000 + number)
    return SimRequest(f"r{number}", at_s, len(names) * UNIT + 8, 0, answer, names, UNIT)


def crowd(seed: int) -> list[SimRequest]:
    """Return few questions, then many, with other prompts throughout."""
    rng = random.Random(seed)
    requests, at_s = [question(0, 0.0)], 0.0
    while at_s < 14.0:
        at_s += rng.expovariate(0.5 if at_s < 6.0 else 10.0)
        requests.append(question(len(requests), at_s, rng.randint(20, 100)))
    at_s = 0.0
    while at_s < 14.0:
        at_s += rng.expovariate(8.0)
        tokens = UNIT * rng.randint(20, 120)
        requests.append(SimRequest(f"other{len(requests)}", at_s, tokens, 0, rng.randint(20, 100)))
    return requests


def run(policy: Policy, requests: Sequence[SimRequest], instances: int = 4) -> SimResult:
    spec = ClusterSpec.uniform(instances, PROFILE, prefix_caching=True)
    return simulate(spec, requests, policy, EarliestDue())


def mean_ttft(results: Sequence[SimResult]) -> float:
    """Return the mean TTFT of the questions, in seconds."""
    question = [
        r.ttft_s or 0.0 for result in results for r in result.requests if r.request_id.startswith("r")
    ]
    return sum(question) / len(question)


def test_copies_shorten_ttft_and_add_no_computation() -> None:
    workloads = [crowd(seed) for seed in range(3)]
    without, ahead = (
        [run(Tailrace(PROFILE, copy_ahead=on), requests) for requests in workloads] for on in (False, True)
    )
    copies = [pull for result in ahead for pull in result.pulls if pull.ahead]
    assert not any(pull.ahead for result in without for pull in result.pulls)
    assert copies and all(pull.tokens >= len(DOCUMENT) * UNIT for pull in copies)
    assert mean_ttft(ahead) < mean_ttft(without)
    found, before = (
        sum(r.cached_tokens for result in results for r in result.requests) for results in (ahead, without)
    )
    assert found >= before


def test_copies_are_reproducible() -> None:
    first, again = (run(Tailrace(PROFILE, copy_ahead=True), crowd(0)) for _ in range(2))
    assert first.pulls == again.pulls


class CopyAtOnce(Policy):
    """Place on the first instance and copy to the second when possible; later arrivals go to the second."""

    tick_interval_s = 0.25
    prefixes_period_s = 30.0

    def __init__(self) -> None:
        self.question: list[CopyPrefix] = []

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Place(list(view.instances)[now >= 5.0])

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        assert view.hot is not None
        first, second = view.instances
        actions: list[Action] = []
        for prefix in view.hot.prefixes:
            if first in prefix.requests and prefix.cached[first].reported == prefix.tokens:
                # The duplicate has no effect.
                copy = CopyPrefix(prefix.requests[first], first, second, prefix.tokens, "test")
                actions += [copy, copy]
        return actions


def test_a_copied_prefix_is_found_and_copied_once() -> None:
    requests = [question(0, 0.0, 900), question(1, 1.0, 900), question(2, 5.0)]
    result = run(CopyAtOnce(), requests, 2)
    (copy,) = result.pulls
    assert copy.ahead and copy.tokens == len(DOCUMENT) * UNIT and not copy.requests
    assert result.requests[2].cached_tokens == copy.tokens
    # Copies do not overlap.
    assert all(one.end_s <= other.requested_s for one, other in pairwise(result.pulls))


def test_requests_without_unit_names_are_not_copied() -> None:
    requests = [SimRequest(f"r{n}", n / 2, 2_000, 0, 400) for n in range(8)]
    assert run(CopyAtOnce(), requests, 2).pulls == []
