"""Whose a request is, as text that travels with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.tenancy.share import Share


@given(st.text(max_size=100), st.floats(0.01, 100.0))
def test_a_share_travels_as_text(tenant: str, weight: float) -> None:
    assert Share.decode(Share(tenant, weight).encode()) == Share(tenant, weight)


@pytest.mark.parametrize("value", ["", "1.0", "x y", "0 a", "nan a", "inf a", "-1 a", " a"])
def test_what_is_no_share_is_nobodys(value: str) -> None:
    assert Share.decode(value) == Share()
