"""The modules that are mutated, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Target:
    """A module and its tests: files that are fast, since every mutant runs them all."""

    module: str
    tests: tuple[str, ...]


_POLICY: Final = "tests/policy/"
# Declared parameters, in the classes and in the documentation.
_DECLARED: Final = (_POLICY + "test_parameters.py", _POLICY + "test_paper_pages.py")
_ORDERS: Final = ("tests/intra", "tests/worker/test_step_order.py", *_DECLARED)
_TAILRACE: Final = (
    _POLICY + "test_tailrace.py",
    _POLICY + "test_placing_by_prefix.py",
)

_ROLLOUT: Final = ("tests/control/test_rollout.py", "tests/control/test_rollout_weights.py")
_ARROW: Final = (
    _POLICY + "test_arrow_boundaries.py",
    _POLICY + "test_arrow_pools.py",
    _POLICY + "test_arrow_variants.py",
)

TARGETS: Final = (
    Target("frontend_svc/streams.py", ("tests/frontend/test_streams.py",)),
    Target("frontend_svc/adopt.py", ("tests/frontend/test_adopt.py", "tests/frontend/test_rollouts.py")),
    Target("tailrace/intra/allocate.py", _ORDERS),
    Target("tailrace/intra/pascal.py", _ORDERS),
    Target("tailrace/intra/earliest_due.py", _ORDERS),
    Target(
        "tailrace/control/cluster_model.py",
        (
            "tests/control/test_corrections.py",
            "tests/scheduler/test_lengths.py",
            "tests/scheduler/test_models.py",
            "tests/control/test_two_models.py",
        ),
    ),
    Target(
        "tailrace/control/runner.py",
        ("tests/control/test_runner.py", "tests/scheduler/test_decisions.py"),
    ),
    Target("tailrace/control/guard.py", ("tests/control/test_guard.py",)),
    Target("tailrace/control/active_policy.py", ("tests/scheduler/test_active_policy.py",)),
    Target("tailrace/bid_ask.py", (_POLICY + "test_bid_ask.py", _POLICY + "test_paper_pages.py")),
    Target("tailrace/policy/cascade/planner.py", (_POLICY + "test_cascade_planner.py",)),
    Target(
        "tailrace/policy/cascade/policy.py",
        (
            _POLICY + "test_cascade_periods.py",
            _POLICY + "test_cascade_policy.py",
            _POLICY + "test_sound_decisions.py",
            *_DECLARED,
        ),
    ),
    Target(
        "tailrace/policy/pascal.py",
        (_POLICY + "test_pascal.py", _POLICY + "test_pascal_and_ares.py", *_DECLARED),
    ),
    Target("tailrace/policy/ares/rescheduling.py", (_POLICY + "test_ares.py", *_DECLARED)),
    Target(
        "tailrace/policy/ares/policy.py",
        (_POLICY + "test_ares.py", _POLICY + "test_pascal_and_ares.py", *_DECLARED),
    ),
    Target(
        "tailrace/policy/arrow/pools.py",
        (_POLICY + "test_arrow_pools.py", _POLICY + "test_sound_decisions.py"),
    ),
    Target("tailrace/policy/arrow/policy.py", (*_ARROW, *_DECLARED)),
    Target("tailrace/policy/arrow/attainment.py", _ARROW),
    Target("tailrace/policy/tailrace/costs.py", _TAILRACE),
    Target("tailrace/policy/tailrace/queue.py", _TAILRACE),
    Target("tailrace/policy/tailrace/rebalance.py", _TAILRACE),
    Target("tailrace/policy/tailrace/copies.py", (_POLICY + "test_tailrace_copies.py",)),
    Target("tailrace/control/admission.py", ("tests/control/test_admission.py",)),
    Target("tailrace/control/hot_prefixes.py", ("tests/control/test_hot_prefixes.py",)),
    Target(
        "tailrace/perf/remaining.py",
        (
            "tests/control/test_admission.py",
            _POLICY + "test_length_limits.py",
            _POLICY + "test_ares.py",
            *_ARROW,
        ),
    ),
    Target("tailrace/cache/recent.py", ("tests/cache/test_recent.py",)),
    Target("tailrace/tenancy/fair_queue.py", ("tests/tenancy/test_fair_queue.py",)),
    Target("tailrace/rollout/facts.py", _ROLLOUT),
    Target("tailrace/rollout/progress.py", _ROLLOUT),
    Target("tailrace/rollout/record.py", _ROLLOUT),
    Target("tailrace/rollout/requests.py", _ROLLOUT),
    Target("frontend_svc/answers/store.py", ("tests/frontend/test_answers.py",)),
)
