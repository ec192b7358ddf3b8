"""A request's tenant and weight, encoded as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.tenancy.keys import Share


@given(st.text(max_size=100), st.floats(0.01, 100.0))
def test_share_survives_a_round_trip(tenant: str, weight: float) -> None:
    assert Share.decode(Share(tenant, weight).encode()) == Share(tenant, weight)


@pytest.mark.parametrize("value", ["", "1.0", "x y", "0 a", "nan a", "inf a", "-1 a", " a"])
def test_invalid_share_decodes_to_the_default(value: str) -> None:
    assert Share.decode(value) == Share()
