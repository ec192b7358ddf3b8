"""The length at which a request outgrows the stage of its instance."""

from __future__ import annotations

from tailrace.cluster import Stage, length_bounds


def test_bounds_are_the_ends_of_each_instances_longest_stage() -> None:
    stages = (Stage(0, 100, ("a", "b")), Stage(100, 200, ("b", "c")), Stage(200, 400, ("d",)))
    assert length_bounds(stages) == {"a": 100, "b": 200, "c": 200, "d": 400}
    assert length_bounds(stages[::-1]) == length_bounds(stages)
    assert length_bounds(()) == {}
