"""A key can stand for several precisions of the same weights."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.model_identity import covers
from tailrace.rollout.requests import SameWeights, group_by_weights

KEYS = st.sampled_from(["text:a", "text:a:x", "text:a:y", "text:b", "text:b:x", "text:ab:x", "other:a:x"])


@given(st.frozensets(KEYS))
def test_each_key_is_only_in_the_group_of_its_weights(keys: frozenset[str]) -> None:
    groups = group_by_weights(keys)
    assert sorted(key for group in groups for key in group.keys) == sorted(keys)
    for key in keys:
        (of_it,) = [group for group in groups if group.includes(key)]
        assert key in of_it.keys
        assert covers(of_it.key, key)


def test_one_precision_has_its_own_key_and_several_share_one() -> None:
    both = SameWeights("text:a", frozenset({"text:a:x", "text:a:y"}))
    assert both.key == "text:a"
    assert both.without("text:a:x").key == "text:a:y"
    one = both.without("text:a:x")
    assert one.without("text:a:y") == one
    assert both.without("text:b:x") == both
    assert both.includes("text:a:z") and not both.includes("text:ab:x")
