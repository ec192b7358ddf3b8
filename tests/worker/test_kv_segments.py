"""Memory shared by two processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.waiting import WAIT_S
from worker_agent.kv.memory import Mappings, Segment, SegmentName, Segments, this_host

SIZE = 64 << 10
# Maps the segment named by its arguments and prints the sum of its bytes.
READER = """
import sys
from worker_agent.kv.memory import Mappings, SegmentName
name = SegmentName(*map(int, sys.argv[1:]))
print(int(Mappings().map(name).sum()))
"""


def test_another_process_reads_the_segment() -> None:
    segment = Segment(SIZE)
    segment.memory[:] = 7
    name = segment.name
    arguments = [str(each) for each in (name.process, name.descriptor, name.size, name.inode)]
    read = subprocess.run(
        [sys.executable, "-c", READER, *arguments], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert int(read.stdout) == 7 * SIZE
    segment.close()


def test_segment_name_survives_a_round_trip() -> None:
    name = SegmentName(1, 2, 3 << 40, 4 << 40)
    assert SegmentName.decode(name.encode()) == name
    assert SegmentName.decode(bytes(len(name.encode()))) is None


def test_mapping_outlives_its_owner() -> None:
    segment, mappings = Segment(SIZE), Mappings()
    segment.memory[:] = 9
    mapped = mappings.map(segment.name)
    segment.close()
    del segment
    gc.collect()
    assert (mapped == 9).all()


def test_reader_cannot_change_the_sources_memory() -> None:
    segment = Segment(SIZE)
    Mappings().map(segment.name)[:] = 1
    assert not segment.memory.any()
    segment.close()


def test_other_memory_than_the_segment_is_refused() -> None:
    segment, mappings = Segment(SIZE), Mappings()
    for wrong in (
        replace(segment.name, inode=segment.name.inode + 1),
        replace(segment.name, size=2 * SIZE),
        replace(segment.name, descriptor=0),
        replace(segment.name, process=1),
    ):
        with pytest.raises(OSError):
            mappings.map(wrong)
    segment.close()
    with pytest.raises(OSError):
        mappings.map(segment.name)


def test_memory_that_can_shrink_is_refused() -> None:
    """Reading beyond the end of a file would kill the process."""
    descriptor = os.memfd_create("shrinks", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    with pytest.raises(OSError, match="shrink"):
        Mappings().map(SegmentName(os.getpid(), descriptor, SIZE, os.fstat(descriptor).st_ino))
    os.close(descriptor)
    segment = Segment(SIZE)
    with pytest.raises(OSError):
        os.ftruncate(segment.name.descriptor, SIZE // 2)
    segment.close()


def test_segments_are_reused_and_few_are_kept() -> None:
    segments = Segments()
    segments_in_use = [segments.take(SIZE) for _ in range(9)]
    assert len({each.name for each in segments_in_use}) == 9
    for each in segments_in_use:
        each.memory[:] = 1
        segments.give_back(each)
    larger = segments.take(2 * SIZE)
    assert not larger.memory.any()
    larger.close()
    again = [segments.take(SIZE) for _ in range(9)]
    assert sum(bool(np.any(each.memory)) for each in again) == 4
    for each in again:
        each.close()
    segments.close()


def test_memory_is_shared_within_a_host_unless_ucx_transports_are_set() -> None:
    host = this_host({})
    assert host and this_host({"UCX_TLS": "sm,tcp"}) == host
    assert this_host({"UCX_TLS": "tcp"}) == this_host({"UCX_TLS": "^sm"}) == b""


def test_mapping_is_kept_while_it_is_used_and_a_few_are_kept_for_the_next_transfers() -> None:
    before, mappings = open_files(), Mappings()
    segments = [Segment(SIZE) for _ in range(9)]
    mapped = [mappings.map(segment.name) for segment in segments]
    assert np.shares_memory(mappings.map(segments[0].name), mapped[0])
    del mapped
    for segment in segments:
        mappings.release(segment.name)
    # The first has another user still.
    assert len(mappings) == 5
    mappings.release(segments[0].name)
    assert len(mappings) == 4
    for segment in segments:
        segment.close()
    mappings.drop_gone()
    assert (len(mappings), open_files()) == (0, before)


def test_mapping_of_a_peer_that_is_gone_is_dropped_once_nobody_uses_it() -> None:
    gone, here, mappings = Segment(SIZE), Segment(SIZE), Mappings()
    for segment in (gone, here):
        segment.memory[:] = 3
        mappings.map(segment.name)
    mappings.release(here.name)
    view = mappings.map(gone.name)
    mappings.release(gone.name)
    gone.close()
    mappings.drop_gone()
    assert len(mappings) == 2 and (view == 3).all()
    mappings.release(gone.name)
    # An error that is being handled may have a view of it in its frames.
    mappings.drop_gone()
    assert len(mappings) == 1 and (view == 3).all()
    here.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
