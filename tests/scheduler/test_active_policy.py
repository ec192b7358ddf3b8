"""A policy that somebody's package brings along and that cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from scheduler_svc.active_policy import ActivePolicy, warm_up
from scheduler_svc.admin.listing import policy_infos
from tailrace.policy import registry
from tailrace.policy.round_robin import RoundRobin


class Broken(RoundRobin):
    """Its package fails in a way that nobody foresaw."""

    def __init__(self) -> None:
        raise ZeroDivisionError("its own mistake")


class Stranger:
    """No policy at all."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    places = {
        "good": "tailrace.policy.least_loaded:LeastLoaded",
        "broken": f"{__name__}:Broken",
        "stranger": f"{__name__}:Stranger",
        "absent": "no_such_module:Policy",
    }
    points = [EntryPoint(name, place, registry.GROUP) for name, place in places.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry._points.cache_clear()
    yield
    registry._points.cache_clear()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("broken", "ZeroDivisionError: its own mistake"),
        ("stranger", r"not a tailrace\.policy\.base\.Policy"),
        ("absent", "no_such_module"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_it_is_not_followed_and_listed_with_the_reason(name: str, says: str) -> None:
    with pytest.raises(registry.UnusablePolicyError, match=says):
        registry.load(name)
    active = ActivePolicy("good")
    before = active.policy
    # As a scheduler's listener of membership calls it: what it raised would end the watch of etcd.
    active.follow(name)
    assert active.name == "good" and active.policy is before
    summaries = {info.name: info.summary for info in policy_infos("good")}
    assert "cannot be loaded" in summaries[name] or "not a tailrace" in summaries[name]


@pytest.mark.usefixtures("installed")
async def test_warming_up_outlives_it(caplog: pytest.LogCaptureFixture) -> None:
    await warm_up()
    assert "its own mistake" in caplog.text
