"""The ledger of request bodies: what is held is given back exactly once, in every order of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.tenancy.meter import Bodies, Body

EVENTS = st.one_of(
    st.tuples(st.just("open"), st.sampled_from("abc"), st.just(0)),
    st.tuples(st.just("grow"), st.integers(0, 5), st.integers(0, 120)),
    st.tuples(st.sampled_from(["arrive", "arrived", "close"]), st.integers(0, 5), st.just(0)),
)


@given(st.booleans(), st.lists(EVENTS, max_size=60))
def test_what_is_held_is_given_back_exactly_once(
    has_tenants: bool, events: list[tuple[str, object, int]]
) -> None:
    ledger = Bodies(100, 4, has_tenants)
    bodies: list[tuple[str, Body]] = []
    held: dict[int, tuple[int, bool]] = {}
    for event, which, size in events:
        if event == "open":
            bodies.append((str(which), ledger.open(str(which))))
            held[len(bodies) - 1] = (0, False)
            continue
        assert isinstance(which, int)
        if which >= len(bodies):
            continue
        body = bodies[which][1]
        before = held.get(which)
        if event == "grow":
            if body.grow(size) is None and before is not None:
                held[which] = (max(before[0], size), before[1])
        elif event == "arrive":
            if body.begin_arriving() is None and before is not None:
                held[which] = (before[0], True)
        elif event == "arrived":
            body.end_arriving()
            if before is not None:
                held[which] = (before[0], False)
        else:
            body.close()
            held.pop(which, None)
        assert ledger.bytes == sum(size for size, _ in held.values()) <= 100
        assert ledger.arriving == sum(arriving for _, arriving in held.values()) <= 4
        for tenant in "abc" if has_tenants else "":
            own = [held[number] for number in held if bodies[number][0] == tenant]
            assert sum(size for size, _ in own) <= 50 and sum(arriving for _, arriving in own) <= 2
    for _, body in bodies:
        body.close()
    assert (ledger.bytes, ledger.arriving) == (0, 0)
    # Nothing is remembered of those that are gone, and everything can be held again.
    assert ledger == Bodies(100, 4, has_tenants)


def test_one_tenant_leaves_room_for_others() -> None:
    ledger = Bodies(100, 4, has_tenants=True)
    assert ledger.open("a").grow(50) is None
    exceeded = ledger.open("a").grow(1)
    assert exceeded is not None and "50 bytes" in exceeded.reason and exceeded.retry_after_s > 0
    assert ledger.open("b").grow(50) is None
    exceeded = ledger.open("c").grow(1)
    assert exceeded is not None and "100 bytes" in exceeded.reason
