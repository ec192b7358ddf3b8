"""What a target may read of an export."""

from __future__ import annotations

import pytest

from worker_agent.kv.address import KvTransferError
from worker_agent.kv.sessions import Session

NAMES = [bytes([number]) * 32 for number in range(4)]


def test_blocks_may_be_read_from_when_they_are_announced() -> None:
    session = Session("request")
    session.announce(0, NAMES[:2])
    assert session.may_read(1, 1)
    assert not session.may_read(1, 2)
    session.announce(2, NAMES[2:])
    assert session.hashes(1, 3) == NAMES[1:]


def test_blocks_that_were_not_computed_yet_get_their_names_later() -> None:
    session = Session("request")
    session.announce(0, NAMES[:3])
    session.announce(2, NAMES[3:])
    assert session.hashes(0, 4) == [*NAMES[:2], NAMES[3]]


def test_none_is_left_out() -> None:
    session = Session("request")
    session.announce(0, NAMES[:1])
    with pytest.raises(KvTransferError, match="block 2 announced after 1 blocks"):
        session.announce(2, NAMES[2:])
