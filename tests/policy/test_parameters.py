"""Declared parameters: accepted and refused values, error messages, and consistency with constructors."""

from __future__ import annotations

import inspect
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.control.active_policy import ActivePolicy
from tailrace.intra.registry import INTRA_POLICIES
from tailrace.policy import registry
from tailrace.policy.ares.policy import Ares
from tailrace.policy.arrow.policy import Arrow
from tailrace.policy.deployment import Deployment, Fact
from tailrace.policy.parameters import (
    Parameter,
    ParameterError,
    Parametrized,
    Value,
    format_value,
    parameter,
    parse_parameters,
)
from tailrace.policy.pascal import Pascal
from tailrace.policy.tailrace.policy import Tailrace
from tailrace.records import PolicyRecord
from tailrace.slo import Slo


class Declaring(Parametrized):
    """One parameter of each type."""

    count: int = parameter(3, "so many", unit="tokens", minimum=1, maximum=10)
    share: float = parameter(0.5, "so much", minimum=0.0)
    eager: bool = parameter(False, "or not")
    rule: str = parameter("paper", "which", choices=("paper", "ours"))


DECLARED = Declaring.parameters


class AlsoDeclaring(Declaring):
    """Another one, and one declared anew."""

    share: float = parameter(0.25, "less", minimum=0.0)
    pace: float = parameter(1.0, "how fast")


def test_missing_values_get_their_defaults() -> None:
    expected: dict[str, Value] = {"count": 3, "share": 0.5, "eager": False, "rule": "paper"}
    assert parse_parameters("policy 'p'", DECLARED, {}) == expected


@pytest.mark.parametrize(
    ("name", "given_value", "value"),
    [
        ("count", "7", 7),
        ("count", 7, 7),
        ("count", 7.0, 7),
        ("share", "2", 2.0),
        ("share", 2, 2.0),
        ("share", "1e-3", 0.001),
        ("eager", "true", True),
        ("eager", "False", False),
        ("eager", True, True),
        ("rule", "ours", "ours"),
    ],
)
def test_values_are_converted_to_the_declared_type(name: str, given_value: Value, value: Value) -> None:
    found = parse_parameters("policy 'p'", DECLARED, {name: given_value})[name]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "given_value", "message"),
    [
        (
            "count",
            "many",
            "policy 'p', parameter 'count': 'many' is not allowed; it is an integer from 1 to 10",
        ),
        ("count", "0", "an integer from 1 to 10 (tokens)"),
        ("count", "2.5", "an integer"),
        ("count", 2.5, "an integer"),
        ("count", True, "an integer"),
        ("count", 10**400, "an integer"),
        ("share", "-0.1", "a number of at least 0"),
        ("share", "nan", "a number of at least 0"),
        ("share", "inf", "a number from 0 to 1e+12"),
        ("share", "1e308", "a number from 0 to 1e+12"),
        ("share", "1_0", "a number of at least 0"),
        ("share", " 1", "a number of at least 0"),
        ("share", 10**400, "a number of at least 0"),
        ("share", False, "a number"),
        ("eager", "maybe", "true or false"),
        ("eager", 1, "true or false"),
        ("rule", "theirs", "one of paper, ours"),
        ("rule", 1, "one of paper, ours"),
        ("pace", "1", "policy 'p' has no parameter 'pace'; its parameters: count, eager, rule, share"),
        ("shares", "1", "policy 'p' has no parameter 'shares' (did you mean 'share'?); its parameters: "),
    ],
)
def test_errors_state_what_is_allowed(name: str, given_value: Value, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        parse_parameters("policy 'p'", DECLARED, {name: given_value})
    assert message in str(error.value)


def test_an_integer_that_no_float_holds_is_refused() -> None:
    with pytest.raises(ParameterError, match="horizon_tokens"):
        ActivePolicy(PolicyRecord(name="ares", parameters={"horizon_tokens": 10**400}))


@pytest.mark.parametrize("horizon", [{"horizon_tokens": 1}, {"horizon_points": 4_096}])
def test_a_horizon_of_too_few_tokens_is_named(horizon: dict[str, Value]) -> None:
    with pytest.raises(ParameterError, match=r"horizon_points is \d+, more than horizon_tokens"):
        registry.load("ares", parameters=horizon)


@pytest.mark.parametrize("value", ["1e308", "1e7"])
def test_no_order_passes_over_more_than_engines_count(value: str) -> None:
    with pytest.raises(ParameterError, match=r"pass_over.*from 0 to 1e\+06"):
        registry.load("tailrace", parameters={"pass_over": value})


def test_a_policy_without_parameters_says_so() -> None:
    with pytest.raises(
        ParameterError, match="policy 'round_robin' has no parameter 'x'; it has no parameters"
    ):
        registry.load("round_robin", parameters={"x": 1})


@given(st.floats(-1e12, 1e12) | st.integers(-(2**53), 2**53) | st.booleans())
def test_formatted_values_are_read_back(value: float | int | bool) -> None:
    assert Parameter(value, "any").parse(format_value(value)) == value


@pytest.mark.parametrize(
    "bad",
    [
        {"default": ()},
        {"default": 11},
        {"choices": ("a",)},
        {"default": "a", "choices": "abc"},
        {"default": "a", "choices": ("a", 5)},
        {"description": None},
        {"unit": 5},
    ],
)
def test_contradictory_declarations_are_errors(bad: dict[str, Value]) -> None:
    words: dict[str, object] = {"default": 3, "description": "", **bad}
    if isinstance(words["default"], int):
        words["maximum"] = 10
    with pytest.raises((TypeError, ValueError)):
        Parameter(**words)  # type: ignore[arg-type]


def test_an_object_has_what_it_was_given_else_the_default() -> None:
    made = Declaring(share=2.0)
    assert (made.count, made.share, made.eager, made.rule) == (3, 2.0, False, "paper")
    assert (Declaring.count, Declaring.share) == (3, 0.5)
    with pytest.raises(TypeError, match="Declaring has no parameter 'pace'"):
        Declaring(pace=1.0)


def test_a_subclass_adds_parameters_and_declares_some_anew() -> None:
    assert [p.name for p in AlsoDeclaring.parameters] == ["count", "eager", "rule", "share", "pace"]
    assert [p.name for p in Declaring.parameters] == ["count", "share", "eager", "rule"]
    made = AlsoDeclaring(pace=2.0)
    assert (made.count, made.share, made.pace) == (3, 0.25, 2.0)


@pytest.mark.parametrize("name", registry.names())
def test_policies_take_their_parameters_and_facts(name: str) -> None:
    kind = registry.choose(name).policy
    check_declared(kind, kind.parameters)
    for fact in kind.needs:
        assert fact.value in inspect.signature(kind).parameters
    policy = registry.load(name, parameters={p.name: p.default for p in kind.parameters})
    assert vars(policy).keys() == vars(kind()).keys()


@pytest.mark.parametrize("name", sorted(INTRA_POLICIES))
def test_batch_orders_take_their_parameters(name: str) -> None:
    check_declared(INTRA_POLICIES[name], INTRA_POLICIES[name].parameters)


def check_declared(kind: type, declared: tuple[Parameter, ...]) -> None:
    """Assert that each parameter is an attribute of the objects, and that nothing else that a user could set
    is an argument of the constructor. Deployment facts are exempt."""
    assert len({p.name for p in declared}) == len(declared)
    made = kind(**{p.name: p.default for p in declared})
    for each in declared:
        assert each.description and each.source
        assert getattr(made, each.name) == each.default
    for name, taken in inspect.signature(kind).parameters.items():
        plain = isinstance(taken.default, (bool, int, float, str))
        assert name in set(Fact) or not plain, f"{kind.__name__} takes {name} and does not declare it"


@pytest.mark.parametrize("name", registry.names())
def test_a_policy_and_its_batch_order_share_parameter_definitions(name: str) -> None:
    kind = registry.choose(name).policy
    order = INTRA_POLICIES.get(kind.batch_order)
    of_order = {p.name: p for p in order.parameters} if order is not None else {}
    for each in kind.parameters:
        assert of_order.get(each.name, each) == each


def test_parameters_reach_the_policy() -> None:
    pascal = registry.load("pascal", parameters={"quantum_tokens": "200", "growth_tokens": 10})
    assert isinstance(pascal, Pascal)
    assert (pascal.quantum_tokens, pascal.growth_tokens, pascal.behind_tokens) == (200, 10, 1.0)
    ares = registry.load("ares", parameters={"theta": 0.3, "horizon_points": 4})
    assert isinstance(ares, Ares)
    assert ares.algorithm.theta == 0.3 and ares.horizon.points == 4


def test_batch_order_parameters_are_checked_with_the_policy() -> None:
    assert isinstance(registry.load("pascal", parameters={"demotion_tokens": 100}), Pascal)
    with pytest.raises(ParameterError, match="demotion_tokens"):
        registry.load("pascal", parameters={"demotion_tokens": "never"})
    with pytest.raises(ParameterError, match="policy 'arrow' has no parameter 'demotion_tokens'"):
        registry.load("arrow", parameters={"demotion_tokens": 100})


def test_contradictory_values_are_refused() -> None:
    with pytest.raises(
        ParameterError, match=r"policy .ares.: horizon_points is 20, more than horizon_tokens, 10"
    ):
        registry.load("ares", parameters={"horizon_tokens": 10, "horizon_points": 20})


def test_policies_get_the_slos() -> None:
    arrow = registry.load("arrow", slo=Slo(0.5, 0.03))
    assert isinstance(arrow, Arrow)
    assert (arrow.ttft_slo_s, arrow.tpot_slo_s) == (0.5, 0.03)


@pytest.mark.parametrize("name", registry.names())
def test_every_policy_that_needs_the_slos_plans_for_them(name: str) -> None:
    slo = Slo(0.5, 0.03, 0.9)
    policy = registry.load(name, slo=slo)
    facts = Deployment(slo).facts(policy.needs)
    assert ("ttft_slo_s" in facts) == ("ttft_slo_s" in inspect.signature(type(policy)).parameters)
    assert ("tpot_slo_s" in facts) == ("tpot_slo_s" in inspect.signature(type(policy)).parameters)
    assert getattr(policy, "ttft_slo_s", 0.5) == 0.5
    assert getattr(policy, "tpot_slo_s", 0.03) == 0.03
    if isinstance(policy, Tailrace):
        assert policy.costs.tpot_slo_s == 0.03


def test_an_unset_slo_leaves_the_default_of_the_policy() -> None:
    arrow = registry.load("arrow", slo=Slo(None, 0.03))
    assert isinstance(arrow, Arrow)
    assert (arrow.ttft_slo_s, arrow.tpot_slo_s) == (2.0, 0.03)
    assert math.isfinite(arrow.loads.max_running_tokens)
