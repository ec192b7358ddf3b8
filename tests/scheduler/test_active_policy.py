"""The active policy, including policies of other packages that cannot be loaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from scheduler_svc.admin.listing import policy_infos
from tailrace import plugins
from tailrace.control.active_policy import ActivePolicy, warm_up
from tailrace.policy import registry
from tailrace.policy.arrow.policy import Arrow
from tailrace.policy.round_robin import RoundRobin
from tailrace.records import PolicyRecord
from tailrace.slo import Slo


class Broken(RoundRobin):
    """A policy whose package fails unexpectedly."""

    def __init__(self) -> None:
        raise ZeroDivisionError("its own mistake")


class Exiting(RoundRobin):
    """A policy whose constructor ends the process."""

    def __init__(self) -> None:
        sys.exit(3)


class Undeclared(RoundRobin):
    """A policy whose parameters are none."""

    parameters = "quantum"  # type: ignore[assignment]


class Timed(RoundRobin):
    """A policy whose interval is a word."""

    tick_interval_s = "1"  # type: ignore[assignment]


class Hasty(RoundRobin):
    """A policy that wants to be asked all the time."""

    tick_interval_s = 1e-12


class NotAPolicy:
    """A class that is not a policy."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    places = {
        "good": "tailrace.policy.least_loaded:LeastLoaded",
        "broken": f"{__name__}:Broken",
        "exiting": f"{__name__}:Exiting",
        "undeclared": f"{__name__}:Undeclared",
        "timed": f"{__name__}:Timed",
        "hasty": f"{__name__}:Hasty",
        "stranger": f"{__name__}:NotAPolicy",
        "absent": "no_such_module:Policy",
    }
    points = [EntryPoint(name, place, registry.GROUP) for name, place in places.items()]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == registry.GROUP else [])
    plugins.plugins.cache_clear()
    yield
    plugins.plugins.cache_clear()


def test_a_taken_name_is_tailraces_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = plugins.plugins(registry.GROUP)["pascal"]
    others = [
        EntryPoint(name, f"{__name__}:{kind}", registry.GROUP)
        for name, kind in (
            ("pascal", "Broken"),
            ("mine", "Timed"),
            ("mine", "Exiting"),
        )
    ]
    for points in ([own, *others], [*reversed(others), own]):
        monkeypatch.setattr(plugins, "entry_points", lambda group, points=points: points)
        plugins.plugins.cache_clear()
        found = plugins.plugins(registry.GROUP)
        assert found["pascal"] is own and found["mine"].value == f"{__name__}:Exiting"
    plugins.plugins.cache_clear()
    assert f"'pascal': {own.value} is used, not {__name__}:Broken" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"ZeroDivisionError: its own mistake \(test_active_policy\.py:\d+\)"),
        ("exiting", "'exiting' cannot be loaded: SystemExit: 3"),
        ("undeclared", "parameters: not a tuple of Parameter"),
        ("timed", "'timed' cannot be used: TypeError: tick_interval_s: str is neither a number nor None"),
        ("hasty", "tick_interval_s: 1e-12 is not a time of at least 0.001 seconds"),
        ("stranger", r"not a tailrace\.policy\.base\.Policy"),
        ("absent", "No module named 'no_such_module'; .* found after a restart"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_an_unusable_policy_is_not_activated_and_listed_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(registry.UnusablePolicyError, match=message):
        registry.load(name)
    active = ActivePolicy(PolicyRecord(name="good"))
    before = active.policy
    # A scheduler's membership listener calls this: an exception would end the watch of etcd.
    active.follow(PolicyRecord(name=name), Slo())
    assert active.name == "good" and active.policy is before
    registry.load_all()
    summaries = {info.name: info.summary for info in policy_infos(PolicyRecord(name="good"), {})}
    assert re.search(message, summaries[name])


@pytest.mark.usefixtures("installed")
async def test_warm_up_tolerates_an_unusable_policy(caplog: pytest.LogCaptureFixture) -> None:
    await warm_up()
    assert "its own mistake" in caplog.text


def test_parameters_and_slos_are_followed() -> None:
    active = ActivePolicy(PolicyRecord(name="arrow"), Slo(1.0, 0.1))
    assert isinstance(active.policy, Arrow)
    assert (active.policy.ttft_slo_s, active.policy.tpot_slo_s) == (1.0, 0.1)
    record = PolicyRecord(name="pascal", parameters={"quantum_tokens": 200})
    active.follow(record, Slo(1.0, 0.1))
    assert active.values["quantum_tokens"] == 200
    assert active.values["demotion_tokens"] == 5_000
    before = active.policy
    active.follow(record, Slo(1.0, 0.1))
    assert active.policy is before
    active.follow(PolicyRecord(name="pascal", parameters={"quantum_tokens": 300}), Slo(1.0, 0.1))
    assert active.values["quantum_tokens"] == 300
    # The default again, for other SLOs.
    active.follow(None, Slo(1.0, 0.2))
    assert isinstance(active.policy, Arrow) and active.policy.tpot_slo_s == 0.2


def test_refused_parameters_keep_the_policy_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    active = ActivePolicy(PolicyRecord(name="arrow"))
    bad = PolicyRecord(name="pascal", parameters={"quantum_tokens": 0})
    active.follow(bad, Slo())
    active.follow(bad, Slo())
    assert active.name == "arrow"
    assert caplog.text.count("cannot switch to policy pascal, keeping arrow") == 1
    # SLO changes apply meanwhile.
    active.follow(bad, Slo(0.7, 0.1))
    assert isinstance(active.policy, Arrow) and active.policy.ttft_slo_s == 0.7
    active.follow(bad, Slo(0.7, 0.1))
    active.follow(bad, Slo(0.8, 0.1))
    assert caplog.text.count("cannot switch to policy pascal, keeping arrow") == 1


def test_a_refused_policy_is_retried_after_another_was_active(caplog: pytest.LogCaptureFixture) -> None:
    active = ActivePolicy(PolicyRecord(name="arrow"))
    bad = PolicyRecord(name="pascal", parameters={"quantum_tokens": 0})
    active.follow(bad, Slo())
    active.follow(PolicyRecord(name="ares"), Slo())
    active.follow(bad, Slo())
    assert active.name == "ares"
    assert caplog.text.count("cannot switch to policy pascal, keeping") == 2


def test_a_class_without_an_entry_point_is_for_simulations() -> None:
    with pytest.raises(registry.UnknownPolicyError, match=r"only simulations take module:Class"):
        registry.load("my_policy.headroom:Headroom")
