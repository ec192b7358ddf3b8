"""Series of models and instances that come and go."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from scheduler_svc.metrics import SchedulerMetrics


def test_series_follow_the_members() -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)

    def placements() -> set[tuple[str, str]]:
        (family,) = [each for each in registry.collect() if each.name == "tailrace_scheduler_placements"]
        totals = [each for each in family.samples if each.name.endswith("_total")]
        return {(each.labels["instance"], each.labels["model"]) for each in totals}

    def refusals(model: str) -> float | None:
        return registry.get_sample_value("tailrace_scheduler_refusals_total", {"model": model})

    # Placed before its record is known, as by a scheduler that has just begun.
    metrics.placed("p", "w0", 10, 5, False)
    metrics.keep_members({"w0": "a", "w1": "b"}, {"f": "c"})
    assert placements() == set()
    assert [refusals(model) for model in "abc"] == [0.0, 0.0, 0.0]
    metrics.placed("p", "w0", 10, 5, True)
    metrics.placed("p", "w1", 10, 0, False)
    metrics.refused("f", late=False)
    assert placements() == {("w0", "a"), ("w1", "b")}
    assert refusals("c") == 1.0
    # One instance came back with another model, and one is gone.
    metrics.keep_members({"w0": "b"}, {})
    assert placements() == set()
    assert [refusals(model) for model in "abc"] == [None, 0.0, None]
    metrics.placed("p", "w0", 10, 5, True)
    assert placements() == {("w0", "b")}
