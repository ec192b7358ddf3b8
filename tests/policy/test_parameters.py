"""Declared parameters: accepted and refused values, error messages, and consistency with constructors."""

from __future__ import annotations

import inspect
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.intra.registry import INTRA_POLICIES
from tailrace.policy import registry
from tailrace.policy.ares.policy import Ares
from tailrace.policy.arrow.policy import Arrow
from tailrace.policy.deployment import Deployment, Fact
from tailrace.policy.parameters import Parameter, ParameterError, Value, format_value, parse_parameters
from tailrace.policy.pascal import Pascal
from tailrace.policy.tailrace.policy import Tailrace
from tailrace.slo import Slo

DECLARED = (
    Parameter("count", int, 3, "so many", unit="tokens", minimum=1, maximum=10),
    Parameter("share", float, 0.5, "so much", minimum=0.0),
    Parameter("eager", bool, False, "or not"),
    Parameter("rule", str, "paper", "which", choices=("paper", "ours")),
)


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
        ("share", "-0.1", "a number of at least 0"),
        ("share", "nan", "a number of at least 0"),
        ("share", "inf", "a number of at least 0"),
        ("share", 10**400, "a number of at least 0"),
        ("share", False, "a number"),
        ("eager", "maybe", "true or false"),
        ("eager", 1, "true or false"),
        ("rule", "theirs", "one of paper, ours"),
        ("rule", 1, "one of paper, ours"),
        ("pace", "1", "policy 'p' has no parameter 'pace'; its parameters: count, eager, rule, share"),
    ],
)
def test_errors_state_what_is_allowed(name: str, given_value: Value, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        parse_parameters("policy 'p'", DECLARED, {name: given_value})
    assert message in str(error.value)


def test_a_policy_without_parameters_says_so() -> None:
    with pytest.raises(
        ParameterError, match="policy 'round_robin' has no parameter 'x'; it has no parameters"
    ):
        registry.load("round_robin", parameters={"x": 1})


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans())
def test_formatted_values_are_read_back(value: float | int | bool) -> None:
    parameter = Parameter("p", type(value), value, "any")
    assert parameter.parse(format_value(value)) == value


@pytest.mark.parametrize("bad", [{"default": 0.5}, {"default": 11}, {"name": "a-b"}, {"choices": ("a",)}])
def test_contradictory_declarations_are_errors(bad: dict[str, Value]) -> None:
    words: dict[str, object] = {"name": "count", "type": int, "default": 3, "maximum": 10, **bad}
    with pytest.raises((TypeError, ValueError)):
        Parameter(description="", **words)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", registry.names())
def test_policy_constructors_match_the_declarations(name: str) -> None:
    kind = registry.policy_class(name)
    check_constructor(kind, kind.parameters)
    for fact in kind.needs:
        assert fact.value in inspect.signature(kind).parameters
    policy = registry.load(name, parameters={p.name: p.default for p in kind.parameters})
    assert vars(policy).keys() == vars(kind()).keys()


@pytest.mark.parametrize("name", sorted(INTRA_POLICIES))
def test_batch_order_constructors_match_the_declarations(name: str) -> None:
    check_constructor(INTRA_POLICIES[name], INTRA_POLICIES[name].parameters)


def check_constructor(kind: type, declared: tuple[Parameter, ...]) -> None:
    """Assert that keywords with a simple default are declared with that default, and that all declared
    parameters are accepted. Deployment facts are exempt."""
    signature = inspect.signature(kind).parameters
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values())
    assert len({p.name for p in declared}) == len(declared)
    for parameter in declared:
        assert parameter.description and parameter.source
        if parameter.name in signature:
            assert signature[parameter.name].default == parameter.default
        else:
            assert passes_on
    names = {p.name for p in declared} | set(Fact)
    for name, taken in signature.items():
        plain = isinstance(taken.default, (bool, int, float, str))
        assert name in names or not plain, f"{kind.__name__} takes {name} and does not declare it"


@pytest.mark.parametrize("name", registry.names())
def test_a_policy_and_its_batch_order_share_parameter_definitions(name: str) -> None:
    kind = registry.policy_class(name)
    order = INTRA_POLICIES.get(kind.batch_order)
    of_order = {p.name: p for p in order.parameters} if order is not None else {}
    for parameter in kind.parameters:
        assert of_order.get(parameter.name, parameter) == parameter


def test_parameters_reach_the_policy() -> None:
    pascal = registry.load("pascal", parameters={"quantum_tokens": "200", "growth_tokens": 10})
    assert isinstance(pascal, Pascal)
    assert (pascal.quantum_tokens, pascal.growth_tokens, pascal.behind_tokens) == (200, 10, 1.0)
    ares = registry.load("ares", parameters={"theta": 0.3, "horizon_points": 4})
    assert isinstance(ares, Ares)
    assert ares.rescheduling.theta == 0.3 and ares.horizon.points == 4


def test_batch_order_parameters_are_checked_with_the_policy() -> None:
    assert isinstance(registry.load("pascal", parameters={"demotion_tokens": 100}), Pascal)
    with pytest.raises(ParameterError, match="demotion_tokens"):
        registry.load("pascal", parameters={"demotion_tokens": "never"})
    with pytest.raises(ParameterError, match="policy 'arrow' has no parameter 'demotion_tokens'"):
        registry.load("arrow", parameters={"demotion_tokens": 100})


def test_contradictory_values_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"policy 'ares'.*20 points in 10 steps"):
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
        assert policy.costs.tpot_slo_s == policy.arrow.tpot_slo_s == 0.03
        assert policy.arrow.ttft_slo_s == 0.5


def test_an_unset_slo_leaves_the_default_of_the_policy() -> None:
    arrow = registry.load("arrow", slo=Slo(None, 0.03))
    assert isinstance(arrow, Arrow)
    assert (arrow.ttft_slo_s, arrow.tpot_slo_s) == (2.0, 0.03)
    assert math.isfinite(arrow.loads.max_running_tokens)
