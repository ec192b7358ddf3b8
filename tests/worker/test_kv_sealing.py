"""Encryption of KV in transit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.kv_peer import BlockEngine, Memory, block
from worker_agent.kv.address import KvTransferError, Ticket
from worker_agent.kv.memory import StagingPool, require_sealable
from worker_agent.kv.wire import TAG_BYTES, Bytes, Seal, host_bytes

TICKET = Ticket(bytes(range(32)))
SIZE = 4096


def decrypt(seal: Seal, chunk: int, sealed: Bytes) -> Bytes:
    out = np.zeros(sealed.size - TAG_BYTES, np.uint8)
    seal.open_data(chunk, sealed, out)
    return out


@given(st.integers(0, 2**40), st.binary(max_size=300))
def test_holder_of_the_ticket_can_decrypt(chunk: int, header: bytes) -> None:
    source, target = Seal(TICKET), Seal(TICKET)
    assert target.open_header(chunk, source.seal_header(chunk, header)) == header
    data = block(chunk % 1000, SIZE)
    assert np.array_equal(decrypt(target, chunk, source.seal_data(chunk, data)), data)


def test_others_cannot_decrypt() -> None:
    data = block(7, SIZE)
    sealed, header = Seal(TICKET).seal_data(1, data), Seal(TICKET).seal_header(1, b"hash of 7" * 9)
    assert b"hash of" not in header and data.tobytes()[:16] not in sealed.tobytes()
    for seal, chunk in ((Seal(Ticket.fresh()), 1), (Seal(TICKET), 2)):
        with pytest.raises(KvTransferError, match=f"chunk {chunk} was modified"):
            decrypt(seal, chunk, sealed)
        with pytest.raises(KvTransferError, match=f"chunk {chunk} was modified"):
            seal.open_header(chunk, header)


@given(st.integers(0, SIZE + TAG_BYTES - 1), st.integers(1, 255))
def test_changed_byte_is_detected(at: int, difference: int) -> None:
    sealed = Seal(TICKET).seal_data(3, block(3, SIZE))
    sealed[at] ^= difference
    with pytest.raises(KvTransferError):
        decrypt(Seal(TICKET), 3, sealed)


def test_header_is_not_accepted_as_blocks() -> None:
    header = np.frombuffer(Seal(TICKET).seal_header(5, bytes(64)), np.uint8)
    with pytest.raises(KvTransferError):
        decrypt(Seal(TICKET), 5, header)


class DeviceMemory:
    """KvMemory outside host memory."""

    def staging(self, num_blocks: int) -> Memory:
        raise NotImplementedError

    def staging_over(self, memory: Bytes) -> None:
        return None

    async def read_blocks(self, request_id: str, first_block: int, num_blocks: int, out: object) -> list[int]:
        raise NotImplementedError


def test_sealing_of_device_memory_is_refused() -> None:
    with pytest.raises(KvTransferError, match=r"--encrypt-kv.*WireGuard"):
        require_sealable(DeviceMemory(), 64)


def test_chunks_of_device_memory_are_larger() -> None:
    assert StagingPool(DeviceMemory(), 2 << 20).chunk_blocks == 16
    assert StagingPool(BlockEngine(1, 2 << 20), 2 << 20).chunk_blocks == 4


def test_buffer_bytes_are_not_copied() -> None:
    staging = Memory(np.zeros(8, np.uint8))
    host_bytes(staging)[3] = 9
    assert staging.array[3] == 9
