"""The policy is asked once about each request that has outgrown its instance's stage."""

from __future__ import annotations

from tailrace.control.live import OutgrownRequests


def test_a_request_is_added_once_on_each_instance() -> None:
    outgrown = OutgrownRequests({})
    assert outgrown.add("r", "a")
    assert not outgrown.add("r", "a")
    assert outgrown.add("r", "b")
    assert outgrown.found == {"r": "b"}


def test_requests_that_have_left_are_removed() -> None:
    outgrown = OutgrownRequests({"r": "a", "s": "a", "t": "b"})
    outgrown.keep("a", lambda name: name == "s")
    outgrown.keep("c", lambda name: False)
    assert outgrown.found == {"s": "a", "t": "b"}
    assert outgrown.add("r", "a"), "it has come back"


def test_a_request_that_moved_does_not_leave_with_its_former_instance() -> None:
    outgrown = OutgrownRequests({"r": "a"})
    outgrown.add("r", "b")
    outgrown.keep("a", lambda name: False)
    outgrown.keep_instances(lambda name: name != "a")
    assert outgrown.found == {"r": "b"}


def test_requests_of_instances_that_left_the_cluster_are_removed() -> None:
    outgrown = OutgrownRequests({"r": "a", "t": "b"})
    outgrown.keep_instances(lambda name: name == "b")
    assert outgrown.found == {"t": "b"}
    outgrown.clear()
    assert outgrown.found == {} and outgrown.add("t", "b")
