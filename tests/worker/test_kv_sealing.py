"""KV that is encrypted on its way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.kv_peer import Memory, block
from worker_agent.kv.address import KvTransferError
from worker_agent.kv.sealing import TAG_BYTES, Bytes, Seal, host_bytes
from worker_agent.kv.staging import require_sealable
from worker_agent.kv.ticket import Ticket

TICKET = Ticket(bytes(range(32)))
SIZE = 4096


def opened(seal: Seal, chunk: int, sealed: Bytes) -> Bytes:
    out = np.zeros(sealed.size - TAG_BYTES, np.uint8)
    seal.open_data(chunk, sealed, out)
    return out


@given(st.integers(0, 2**40), st.binary(max_size=300))
def test_who_holds_the_ticket_reads(chunk: int, header: bytes) -> None:
    source, target = Seal(TICKET), Seal(TICKET)
    assert target.open_header(chunk, source.seal_header(chunk, header)) == header
    data = block(chunk % 1000, SIZE)
    assert np.array_equal(opened(target, chunk, source.seal_data(chunk, data)), data)


def test_nobody_else_does() -> None:
    data = block(7, SIZE)
    sealed, header = Seal(TICKET).seal_data(1, data), Seal(TICKET).seal_header(1, b"hash of 7" * 9)
    assert b"hash of" not in header and data.tobytes()[:16] not in sealed.tobytes()
    for seal, chunk in ((Seal(Ticket.fresh()), 1), (Seal(TICKET), 2)):
        with pytest.raises(KvTransferError, match=f"chunk {chunk} was modified"):
            opened(seal, chunk, sealed)
        with pytest.raises(KvTransferError, match=f"chunk {chunk} was modified"):
            seal.open_header(chunk, header)


@given(st.integers(0, SIZE + TAG_BYTES - 1), st.integers(1, 255))
def test_a_byte_that_changed_is_noticed(at: int, difference: int) -> None:
    sealed = Seal(TICKET).seal_data(3, block(3, SIZE))
    sealed[at] ^= difference
    with pytest.raises(KvTransferError):
        opened(Seal(TICKET), 3, sealed)


def test_a_header_is_not_taken_for_blocks() -> None:
    header = np.frombuffer(Seal(TICKET).seal_header(5, bytes(64)), np.uint8)
    with pytest.raises(KvTransferError):
        opened(Seal(TICKET), 5, header)


class DeviceMemory:
    """KvMemory that is not the host's."""

    def staging(self, num_blocks: int) -> Memory:
        raise NotImplementedError

    def staging_over(self, memory: Bytes) -> None:
        return None

    async def read_blocks(self, request_id: str, first_block: int, num_blocks: int, out: object) -> list[int]:
        raise NotImplementedError


def test_kv_in_device_memory_is_said_to_be_beyond_it() -> None:
    with pytest.raises(KvTransferError, match=r"--encrypt-kv.*WireGuard"):
        require_sealable(DeviceMemory(), 64)


def test_bytes_of_a_buffer_are_in_place() -> None:
    staging = Memory(np.zeros(8, np.uint8))
    host_bytes(staging)[3] = 9
    assert staging.array[3] == 9
