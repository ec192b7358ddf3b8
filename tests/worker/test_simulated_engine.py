"""The simulated engine: outputs, batching, KV and refusals."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import msgspec
import pytest

from tailrace.cluster import Phase
from tailrace.output_flags import OutputFlag
from tailrace.wire.outputs import EngineCoreOutputs, FinishReason, read_outputs
from tailrace.wire.ready import read_ready
from tests.waiting import WAIT_S
from tests.worker.simulated import (
    END_THINK,
    EOS,
    SMALL,
    THINK,
    Fleet,
    FrontEnd,
    Stream,
    at_boundary,
    now,
    request_frames,
    undisturbed,
)
from worker_agent.engine.base import (
    ExportedPause,
    RequestKey,
    StepColumns,
    Submission,
)
from worker_agent.engine.errors import EngineRefusal, KvCorrupt, NoRoom, Unrunnable
from worker_agent.engine.simulated import SimulatedEngine, SimulatedSettings

PROMPT = list(b"How long is a piece of string?")


# ---- outputs


def test_output_is_reasoning_then_answer_then_end() -> None:
    stream = undisturbed(PROMPT, max_tokens=None)
    tokens = stream.tokens
    assert (tokens[0], tokens[-1]) == (THINK, EOS)
    assert tokens.count(THINK) == tokens.count(END_THINK) == tokens.count(EOS) == 1
    letters = [token for token in tokens if token < 256]
    assert bytes(letters).decode("ascii").isprintable()
    assert stream.finish == (FinishReason.STOP, None)


def test_phase_changes_are_flagged() -> None:
    stream = undisturbed(PROMPT, max_tokens=None)
    closes = stream.tokens.index(END_THINK)
    for index, flags in enumerate(stream.flags):
        assert bool(flags & OutputFlag.PREFILL_DONE) == (index == 0)
        assert bool(flags & OutputFlag.REASONING_ENDED) == (index == closes)
        assert bool(flags & OutputFlag.ANSWER_BEGUN) == (index == closes + 1)
        assert bool(flags & OutputFlag.FINISHED) == (index == len(stream.tokens) - 1)


def test_seed_and_prompt_determine_the_tokens() -> None:
    same = undisturbed(PROMPT, seed=1, max_tokens=None).tokens
    assert same == undisturbed(PROMPT, seed=1, max_tokens=None).tokens
    assert same != undisturbed(PROMPT, seed=2, max_tokens=None).tokens
    assert same != undisturbed([*PROMPT, 63], seed=1, max_tokens=None).tokens


def test_prompt_with_closed_reasoning_is_answered_directly() -> None:
    stream = undisturbed([*PROMPT, THINK, END_THINK], max_tokens=None)
    assert THINK not in stream.tokens
    assert END_THINK not in stream.tokens


def test_prompt_with_open_reasoning_is_continued() -> None:
    stream = undisturbed([*PROMPT, THINK], max_tokens=None)
    assert THINK not in stream.tokens
    assert stream.tokens.count(END_THINK) == 1


def test_model_without_reasoning() -> None:
    fleet = Fleet(msgspec.structs.replace(SMALL, reasoning_mean_tokens=0))
    stream = fleet.submit(0, PROMPT, max_tokens=None, min_tokens=3)
    fleet.clock.advance(3)
    (stats,) = fleet.engines[0].stats().requests
    assert stats.phase is Phase.ANSWERING
    assert fleet.engines[0].request_stats([stats.request_id, "another"]) == [stats]
    fleet.clock.drain()
    assert END_THINK not in stream.tokens


def test_lengths_requested_by_the_request() -> None:
    stream = undisturbed(PROMPT, max_tokens=None, extra_args={"reasoning_tokens": 5, "answer_tokens": 3})
    assert stream.tokens.index(END_THINK) == 6
    assert len(stream.tokens) == 7 + 3 + 1


def test_max_tokens() -> None:
    stream = undisturbed(PROMPT, max_tokens=3)
    assert len(stream.tokens) == 3
    assert stream.finish == (FinishReason.LENGTH, None)


def test_ignore_eos_generates_up_to_the_maximum_length() -> None:
    stream = undisturbed(PROMPT, max_tokens=None, ignore_eos=True)
    assert EOS not in stream.tokens
    assert len(PROMPT) + len(stream.tokens) == SMALL.max_model_len
    assert stream.finish == (FinishReason.LENGTH, None)


def test_min_tokens_suppresses_eos_and_stop_tokens() -> None:
    space = 32
    arguments = {"max_tokens": None, "extra_args": {"reasoning_tokens": 0, "answer_tokens": 1}}
    stream = undisturbed(PROMPT, min_tokens=30, stop_token_ids=[space], **arguments)
    assert space not in stream.tokens[:30]
    assert EOS not in stream.tokens[:30]
    assert len(stream.tokens) == 31


def test_a_request_whose_every_token_is_forbidden_is_refused() -> None:
    fleet = Fleet(SMALL)
    stream = fleet.submit(0, PROMPT, min_tokens=3, stop_token_ids=list(range(300)))
    assert isinstance(stream.refusal, Unrunnable) and "every letter is a stop token" in str(stream.refusal)


def test_stop_token() -> None:
    plain = undisturbed(PROMPT, max_tokens=None, ignore_eos=True).tokens
    stop = plain[-1]
    stream = undisturbed(PROMPT, max_tokens=None, ignore_eos=True, stop_token_ids=[stop])
    assert stream.tokens == plain[: plain.index(stop) + 1]
    assert stream.finish == (FinishReason.STOP, stop)


def test_last_output_lists_the_request_as_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(SMALL)
    messages: list[EngineCoreOutputs] = []
    sink = fleet.front_end.sink(0)
    accept = sink.on_step

    def on_step(columns: StepColumns) -> None:
        messages.append(read_outputs(columns.frames))
        accept(columns)

    monkeypatch.setattr(sink, "on_step", on_step)
    engine = SimulatedEngine(SMALL, clock=fleet.clock)
    now(engine.start(sink))
    engine.submit(Submission(RequestKey(0, 9), "r", 0, request_frames("r", PROMPT, max_tokens=2)))
    fleet.clock.drain()
    assert [message.finished_requests for message in messages] == [None, ["r"]]
    # The first output contains the values of the prefill for the API server's metrics.
    assert msgspec.msgpack.decode(messages[0].outputs[0].prefill_stats)["num_prompt_tokens"] == len(PROMPT)


# ---- batching and blocks


def test_chunked_prefill_takes_one_step_per_chunk() -> None:
    fleet = Fleet(SMALL)
    stream = fleet.submit(0, PROMPT, max_tokens=4)
    assert len(PROMPT) > SMALL.max_num_batched_tokens
    # Two calls: the engine's wakeup, and the end of the first chunk's step.
    fleet.clock.advance(2)
    assert stream.tokens == []
    assert fleet.engines[0].stats().prefill_backlog_tokens > 0
    fleet.clock.advance()
    assert len(stream.tokens) == 1


def test_step_times_follow_the_profile() -> None:
    fleet = Fleet(msgspec.structs.replace(SMALL, max_num_batched_tokens=64, speed=2.0))
    began_s = fleet.clock.time()
    fleet.submit(0, PROMPT, max_tokens=2)
    fleet.clock.advance(2)
    first_s = fleet.clock.time()
    length = len(PROMPT)
    prefill_ms = 4.50629 + 0.0174934 * length + 5.20357e-07 * length**2
    assert (first_s - began_s) * 1000 == pytest.approx(prefill_ms / 2)
    fleet.clock.advance()
    decode_ms = 6.38476 + 0.0120117 + 4.20068e-05 * (length + 1)
    assert (fleet.clock.time() - first_s) * 1000 == pytest.approx(decode_ms / 2)


def test_running_requests_are_limited() -> None:
    fleet = Fleet(msgspec.structs.replace(SMALL, kv_blocks=1000))
    for number in range(7):
        fleet.submit(0, [*PROMPT, number], max_tokens=20)
    fleet.clock.advance(6)
    states = [request.state for request in fleet.engines[0].stats().requests]
    assert states.count("running") == SMALL.max_num_seqs
    assert states.count("waiting") == 3
    fleet.clock.drain()
    assert fleet.engines[0].stats().requests == []


def test_preempted_requests_yield_the_same_tokens() -> None:
    fleet = Fleet(SMALL)
    prompts = [[*PROMPT[:20], number] for number in range(4)]
    streams = [fleet.submit(0, prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
    fleet.clock.drain()
    assert fleet.engines[0].stats().preemptions > 0
    for stream, prompt in zip(streams, prompts, strict=True):
        assert stream.tokens == undisturbed(prompt, max_tokens=40, ignore_eos=True).tokens
    assert fleet.engines[0].stats().kv_blocks_used == 0


def test_abort_frees_at_once_and_in_any_state() -> None:
    fleet = Fleet(SMALL)
    streams = [fleet.submit(0, [*PROMPT, number], max_tokens=30) for number in range(6)]
    fleet.clock.advance(5)
    engine = fleet.engines[0]
    assert {request.state for request in engine.stats().requests} >= {"running", "waiting"}
    engine.abort([fleet.key(stream) for stream in streams[:5]])
    engine.abort([RequestKey(7, 7)])
    assert len(engine.stats().requests) == 1
    engine.abort_client(0)
    assert engine.stats().kv_blocks_used == 0
    before = [len(stream.tokens) for stream in streams]
    fleet.clock.drain()
    assert [len(stream.tokens) for stream in streams] == before


def test_stats_of_a_request() -> None:
    fleet = Fleet(SMALL)
    stream = fleet.submit(0, PROMPT, max_tokens=30, ignore_eos=True)
    fleet.clock.advance(8)
    stats = fleet.engines[0].stats()
    (request,) = stats.requests
    assert (request.request_id, request.frontend_id, request.epoch) == (stream.request_id, "front-end", 0)
    assert (request.prompt_tokens, request.output_tokens) == (len(PROMPT), len(stream.tokens))
    assert (request.max_tokens, request.arrival_s) == (30, 12.5)
    assert request.kv_blocks == stats.kv_blocks_used == -(-(len(PROMPT) + len(stream.tokens)) // 4)
    assert stats.generated_tokens == len(stream.tokens)
    assert 6 < stats.token_interval_ms_mean <= stats.token_interval_ms_p99 < 8


# ---- impossible requests


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"],
        [msgspec.msgpack.encode(["chatcmpl-1"])],
        request_frames("r", []),
        request_frames("r", [1] * SMALL.max_model_len),
        request_frames("r", [1], prompt_logprobs=1),
        request_frames("r", [1], extra_args={"reasoning_tokens": "many"}),
    ],
    ids=["no msgpack", "no request", "no prompt", "too long", "prompt logprobs", "extra arguments"],
)
def test_impossible_request_fails(frames: list[bytes]) -> None:
    fleet = Fleet(SMALL)
    stream = fleet.submit(0, PROMPT)
    fleet.engines[0].abort([fleet.key(stream)])
    stream.frames, stream.epoch = frames, 1
    fleet.resubmit(stream)
    assert stream.failed
    assert isinstance(stream.refusal, Unrunnable) and str(stream.refusal)
    assert fleet.engines[0].stats().requests == []


def test_fault_fails_a_request_at_an_index_and_it_continues_elsewhere() -> None:
    fleet = Fleet(SMALL, SMALL)
    fleet.faults[0].fail_at_index = 4
    stream = fleet.submit(0, PROMPT, max_tokens=10)
    fleet.clock.drain()
    assert stream.failed
    assert len(stream.tokens) == 4
    assert fleet.engines[0].stats().kv_blocks_used == 0

    stream.failed, stream.owner, stream.epoch = False, 1, 1
    fleet.resubmit(stream)
    fleet.clock.drain()
    assert stream.tokens == undisturbed(PROMPT, max_tokens=10).tokens


def test_hung_engine_continues_when_released() -> None:
    fleet = Fleet(SMALL)
    stream = fleet.submit(0, PROMPT, max_tokens=10)
    fleet.clock.advance(4)
    tokens_before = len(stream.tokens)
    fleet.faults[0].hang = True
    fleet.clock.advance(20)
    assert len(stream.tokens) == tokens_before
    fleet.faults[0].hang = False
    fleet.clock.drain()
    assert stream.tokens == undisturbed(PROMPT, max_tokens=10).tokens


def test_request_resubmitted_after_its_last_token_only_ends() -> None:
    whole = undisturbed(PROMPT, max_tokens=10)
    fleet = Fleet(SMALL)
    stream = fleet.submit(0, PROMPT, max_tokens=10)
    fleet.engines[0].abort([fleet.key(stream)])
    stream.tokens, stream.epoch = list(whole.tokens), 1
    fleet.resubmit(stream)
    assert stream.finish == whole.finish
    assert stream.tokens == whole.tokens


def test_newer_epoch_replaces_an_older_one() -> None:
    fleet = Fleet(SMALL)
    stream = fleet.submit(0, PROMPT, max_tokens=10)
    fleet.clock.advance(4)
    stream.epoch = 1
    fleet.resubmit(stream)
    assert len(fleet.engines[0].stats().requests) == 1
    fleet.clock.drain()
    assert stream.tokens == undisturbed(PROMPT, max_tokens=10).tokens


# ---- migration


LONG = {"max_tokens": 30, "ignore_eos": True, "extra_args": {"reasoning_tokens": 20}}


def _decoding(fleet: Fleet, **sampling: object) -> str:
    stream = fleet.submit(0, PROMPT, **LONG, **sampling)
    fleet.clock.advance(6)
    assert stream.tokens
    return stream.request_id


def _copy(fleet: Fleet, request_id: str, first: int, count: int) -> None:
    """Copy blocks from engine 0 to engine 1."""
    source, target = fleet.engines
    staging = source.staging(count)
    checksums = now(source.read_blocks(request_id, first, count, staging))
    now(target.write_blocks(request_id, first, count, staging, checksums))


def _hand_over(fleet: Fleet, request_id: str) -> ExportedPause:
    """Migrate up to and including import_prepare."""
    source, target = fleet.engines
    exported = now(source.export_open(request_id))
    now(target.import_open(exported, exported.key, exported.epoch + 1))
    pause = at_boundary(fleet.clock, source.export_pause(request_id, 0))
    now(target.import_reserve(request_id, len(pause.block_hashes)))
    _copy(fleet, request_id, 0, len(pause.block_hashes))
    return pause


def test_blocks_cached_at_the_target_need_not_be_copied() -> None:
    keeps = msgspec.structs.replace(SMALL, prefix_caching=True)
    fleet = Fleet(SMALL, keeps)
    before = fleet.submit(1, PROMPT, **LONG)
    fleet.clock.drain()
    request_id = _decoding(fleet)
    source, target = fleet.engines
    exported = now(source.export_open(request_id))
    now(target.import_open(exported, exported.key, exported.epoch + 1))
    held = target.import_cached(request_id)
    assert held == len(exported.block_hashes) > 0
    with pytest.raises(EngineRefusal, match="may be written"):
        _copy(fleet, request_id, 0, held)
    # Other requests cannot evict these blocks.
    hog = fleet.submit(1, list(b"y" * 30), max_tokens=None, ignore_eos=True)
    fleet.clock.advance(4)
    pause = at_boundary(fleet.clock, source.export_pause(request_id, held))
    now(target.import_reserve(request_id, held + len(pause.block_hashes)))
    _copy(fleet, request_id, held, len(pause.block_hashes))
    now(target.import_prepare(request_id, pause))
    stream = fleet.front_end.streams[2]
    stream.owner, stream.epoch = 1, exported.epoch + 1
    now(target.import_activate(request_id))
    now(source.export_release(request_id))
    fleet.clock.drain()
    assert stream.tokens == before.tokens
    assert hog.finish is not None
    # Prompts find them as well: the same answer in less time.
    began_s = fleet.clock.time()
    again = fleet.submit(1, PROMPT, **LONG)
    fleet.clock.drain()
    assert again.tokens == before.tokens
    assert fleet.clock.time() > began_s


def test_prefix_is_lent_verified_and_found() -> None:
    keeps = msgspec.structs.replace(SMALL, prefix_caching=True)
    fleet = Fleet(keeps, keeps)
    before = fleet.submit(0, PROMPT, **LONG)
    fleet.clock.drain()
    source, target = fleet.engines
    stream = Stream("asked", 99, before.frames, 1)
    submission = Submission(fleet.key(stream), "asked", 0, before.frames)
    names = now(target.fetch_open("fetch", submission, 1 << 20))
    assert len(names) == (len(PROMPT) - 1) // keeps.block_tokens
    assert now(source.loan_open("other", [b"unknown", *names])) == 0
    assert now(source.loan_open("loan", names)) == len(names)
    with pytest.raises(EngineRefusal, match="is open"):
        now(source.loan_open("loan", names))
    staging = source.staging(len(names))
    checksums = now(source.read_blocks("loan", 0, len(names), staging))
    with pytest.raises(EngineRefusal, match="have not arrived"):
        now(target.fetch_keep("fetch", len(names)))
    with pytest.raises(KvCorrupt):
        now(target.write_blocks("fetch", 0, len(names), staging, [0, *checksums[1:]]))
    with pytest.raises(KvCorrupt, match="does not match its name"):
        # Valid bytes of another block.
        now(target.write_blocks("fetch", 1, len(names) - 1, staging, checksums[:-1]))
    now(target.write_blocks("fetch", 0, len(names), staging, checksums))
    now(target.fetch_keep("fetch", len(names)))
    now(target.fetch_drop("fetch"))
    now(source.loan_end("loan"))
    now(source.loan_end("other"))
    assert now(target.fetch_open("again", submission, 1 << 20)) == []
    assert target.stats().kv_blocks_used == source.stats().kv_blocks_used == 0
    found = fleet.submit(1, PROMPT, **LONG)
    fleet.clock.drain()
    assert found.tokens == before.tokens
    assert target.stats().cached_prompt_tokens == len(names) * keeps.block_tokens


def test_engine_without_a_prefix_cache_takes_no_prefixes() -> None:
    fleet = Fleet(SMALL, SMALL)
    before = fleet.submit(0, PROMPT, **LONG)
    submission = Submission(fleet.key(before), "asked", 0, before.frames)
    with pytest.raises(EngineRefusal, match="does not accept blocks"):
        now(fleet.engines[1].fetch_open("fetch", submission, 1 << 20))


def test_copy_rounds_followed_by_the_pause() -> None:
    fleet = Fleet(SMALL, SMALL)
    request_id = _decoding(fleet)
    stream = fleet.front_end.streams[1]
    source, target = fleet.engines
    exported = now(source.export_open(request_id))
    assert exported.output_token_ids == stream.tokens
    assert exported.phase is Phase.REASONING
    have = len(exported.block_hashes)
    now(target.import_open(exported, RequestKey(3, 1), 1))
    _copy(fleet, request_id, 0, have)

    fleet.clock.advance(6)
    more = now(source.export_more(request_id, have))
    assert len(more) == 1
    now(target.import_reserve(request_id, have + 1))
    _copy(fleet, request_id, have, 1)
    have += 1

    fleet.clock.advance(2)
    pause = at_boundary(fleet.clock, source.export_pause(request_id, have))
    assert exported.output_token_ids + pause.new_output_token_ids == stream.tokens
    assert pause.computed_tokens == len(PROMPT) + len(stream.tokens) - 1
    fleet.clock.advance(5)
    assert exported.output_token_ids + pause.new_output_token_ids == stream.tokens, "it was paused"
    left = -(-pause.computed_tokens // SMALL.block_tokens) - have
    assert len(pause.block_hashes) == left
    now(target.import_reserve(request_id, have + left))
    _copy(fleet, request_id, have, left)
    now(target.import_prepare(request_id, pause))

    stream.owner, stream.epoch = 1, 1
    now(target.import_activate(request_id))
    now(source.export_release(request_id))
    # On the target it has the front end's client number there.
    assert source.stats().kv_blocks_used == 0
    fleet.clock.drain()
    assert stream.tokens == undisturbed(PROMPT, **LONG).tokens
    assert not any(flags & OutputFlag.PREFILL_DONE for flags in stream.flags[1:])
    assert target.stats().kv_blocks_used == 0


def test_request_continues_at_the_source_after_an_aborted_pause() -> None:
    fleet = Fleet(SMALL, SMALL)
    request_id = _decoding(fleet)
    pause = _hand_over(fleet, request_id)
    now(fleet.engines[1].import_prepare(request_id, pause))
    now(fleet.engines[1].import_drop(request_id))
    now(fleet.engines[0].export_resume(request_id))
    fleet.clock.drain()
    expected = undisturbed(PROMPT, **LONG).tokens
    assert fleet.front_end.streams[1].tokens == expected
    assert [engine.stats().kv_blocks_used for engine in fleet.engines] == [0, 0]


def test_corrupt_bytes_are_detected_on_arrival() -> None:
    fleet = Fleet(SMALL, SMALL)
    request_id = _decoding(fleet)
    fleet.faults[0].flip_bit_in_block = 2
    with pytest.raises(KvCorrupt, match="block 2 arrived damaged"):
        _hand_over(fleet, request_id)


def test_wrong_block_is_detected_before_use() -> None:
    fleet = Fleet(SMALL, SMALL)
    request_id = _decoding(fleet)
    fleet.faults[0].send_wrong_block = 3
    pause = _hand_over(fleet, request_id)
    with pytest.raises(KvCorrupt, match="block 3 does not match the tokens"):
        now(fleet.engines[1].import_prepare(request_id, pause))


@pytest.mark.parametrize("stopped_first", [True, False])
async def test_pause_on_an_engine_that_stops_in_mid_step_is_refused(stopped_first: bool) -> None:
    fleet = Fleet(SMALL, SMALL)
    request_id = _decoding(fleet)
    source = fleet.engines[0]
    now(source.export_open(request_id))
    if stopped_first:
        await source.stop()
    pausing = asyncio.ensure_future(source.export_pause(request_id, 0))
    await asyncio.sleep(0)
    if not stopped_first:
        assert not pausing.done(), "a step is running"
        await source.stop()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(EngineRefusal, match="not on this engine"):
            await pausing


def test_missing_block_is_detected() -> None:
    fleet = Fleet(SMALL, SMALL)
    request_id = _decoding(fleet)
    source, target = fleet.engines
    exported = now(source.export_open(request_id))
    now(target.import_open(exported, exported.key, 1))
    pause = at_boundary(fleet.clock, source.export_pause(request_id, 0))
    _copy(fleet, request_id, 0, 1)
    with pytest.raises(KvCorrupt, match=r"block 1 of .* never received"):
        now(target.import_prepare(request_id, pause))


def test_import_from_another_model_is_refused() -> None:
    fleet = Fleet(SMALL, msgspec.structs.replace(SMALL, weights_seed=1))
    assert fleet.infos[0].kv_shape != fleet.infos[1].kv_shape
    with pytest.raises(KvCorrupt, match="not a block of this model"):
        _hand_over(fleet, _decoding(fleet))


def test_import_with_other_sampling_is_refused() -> None:
    fleet = Fleet(SMALL, SMALL)
    request_id = _decoding(fleet, seed=1)
    pause = _hand_over(fleet, request_id)
    forged = ExportedPause(
        pause.new_output_token_ids, pause.computed_tokens, [], msgspec.msgpack.encode([b"other", 3]), 0.0
    )
    with pytest.raises(EngineRefusal, match="continue differently"):
        now(fleet.engines[1].import_prepare(request_id, forged))


def test_refusals() -> None:
    fleet = Fleet(SMALL, msgspec.structs.replace(SMALL, kv_blocks=9, max_num_seqs=1))
    source, target = fleet.engines
    with pytest.raises(EngineRefusal, match="not on this engine"):
        now(source.export_open("unknown"))
    request_id = _decoding(fleet)
    fleet.submit(0, PROMPT[:8], max_tokens=30, ignore_eos=True)
    fleet.clock.advance(2)
    for number in range(4):
        fleet.submit(0, [*PROMPT, number], max_tokens=30)
    with pytest.raises(EngineRefusal, match="is waiting"):
        now(source.export_open("chatcmpl-5"))
    exported = now(source.export_open(request_id))
    with pytest.raises(EngineRefusal, match="exported already"):
        now(source.export_open(request_id))
    with pytest.raises(EngineRefusal, match="not paused"):
        now(source.export_release(request_id))
    with pytest.raises(EngineRefusal, match=r"blocks .* that can be read"):
        now(source.read_blocks(request_id, 0, 50, source.staging(50)))

    with pytest.raises(EngineRefusal, match="already"):
        now(source.import_open(exported, exported.key, 1))
    fleet.faults[1].refuse_import = "for a test"
    with pytest.raises(EngineRefusal, match="for a test"):
        now(target.import_open(exported, exported.key, 1))
    fleet.faults[1].refuse_import = None
    now(target.import_open(exported, exported.key, 1))
    with pytest.raises(EngineRefusal, match="KV blocks are needed"):
        now(target.import_reserve(request_id, 50))
    with pytest.raises(EngineRefusal, match="not prepared"):
        now(target.import_activate(request_id))
    other = now(source.export_open("chatcmpl-2"))
    with pytest.raises(EngineRefusal, match="the batch is full"):
        now(target.import_open(other, other.key, 1))
    now(target.import_drop(request_id))
    now(target.import_drop(request_id))
    assert target.stats().kv_blocks_used == 0
    fleet.clock.drain()
    with pytest.raises(EngineRefusal, match="not on this engine"):
        at_boundary(fleet.clock, source.export_pause(request_id, 0))


def test_import_without_room_leaves_no_reservation() -> None:
    fleet = Fleet(SMALL, SMALL)
    request_id = _decoding(fleet)
    for number in range(3):
        fleet.submit(1, [*PROMPT, number], max_tokens=30, ignore_eos=True)
    fleet.clock.advance(8)
    used = fleet.engines[1].stats().kv_blocks_used
    exported = now(fleet.engines[0].export_open(request_id))
    with pytest.raises(EngineRefusal, match="KV blocks are needed"):
        now(fleet.engines[1].import_open(exported, exported.key, 1))
    assert fleet.engines[1].stats().kv_blocks_used == used


def test_waiting_prompts_do_not_block_migrated_requests() -> None:
    """As in vLLM, prompts that wait for KV have no slot, so a migrated request that fits is accepted."""
    fleet = Fleet(SMALL, SMALL)
    request_id = _decoding(fleet)
    hog = fleet.submit(1, [7] * 48, max_tokens=20, ignore_eos=True)
    fleet.clock.advance(4)
    for number in range(SMALL.max_num_seqs):
        fleet.submit(1, [number] * 68, max_tokens=2)
    fleet.clock.advance(2)
    states = [request.state for request in fleet.engines[1].stats().requests]
    assert states.count("waiting") == SMALL.max_num_seqs
    pause = _hand_over(fleet, request_id)
    now(fleet.engines[1].import_prepare(request_id, pause))
    now(fleet.engines[1].import_activate(request_id))
    assert {r.request_id: r.state for r in fleet.engines[1].stats().requests}[request_id] == "running"
    assert hog.live
    fleet.engines[1].abort_client(0)
    fleet.engines[0].abort_client(0)


async def _tick(fleet: Fleet, steps: int = 1) -> None:
    """Advance the virtual clock by steps, and run the event loop after each."""
    for _ in range(steps):
        fleet.clock.advance()
        await asyncio.sleep(0)


async def test_imports_wait_for_room_in_order_while_their_sources_decode() -> None:
    fleet = Fleet(msgspec.structs.replace(SMALL, kv_blocks=200, max_num_seqs=20), SMALL)
    source, target = fleet.engines
    moving = [fleet.submit(0, [*PROMPT, *extra], **LONG) for extra in ([1] * 14, [2], [3], [4])]
    fleet.clock.advance(6)
    exports = [await source.export_open(stream.request_id) for stream in moving]
    # Leaves room for a short one, but not for the long one that is first.
    hog = fleet.submit(1, [7] * 48, max_tokens=8, ignore_eos=True)
    prompt = fleet.submit(1, [8] * 66, max_tokens=2)
    fleet.clock.advance(2)
    tasks = [asyncio.ensure_future(target.import_queue(e, e.key, e.epoch + 1)) for e in exports[:3]]
    await _tick(fleet)
    assert not any(task.done() for task in tasks)
    with pytest.raises(NoRoom, match="wait for room"):
        await target.import_open(exports[3], exports[3].key, 1)
    tokens_before = len(moving[0].tokens)
    # The second import is cancelled.
    tasks[1].cancel()
    await target.import_drop(moving[1].request_id)
    while hog.live:
        await _tick(fleet)
    await _tick(fleet)
    # When the hog ends, waiting imports get its room before an earlier prompt.
    assert [task.done() for task in tasks] == [True, True, True]
    await asyncio.gather(tasks[0], tasks[2])
    assert tasks[1].cancelled()
    assert len(moving[0].tokens) > tokens_before
    assert prompt.live and not prompt.tokens
    for stream in moving:
        await target.import_drop(stream.request_id)
    fleet.clock.drain()
    assert len(prompt.tokens) == 2
    assert all(not stream.live for stream in moving)


async def test_waiting_import_ends_with_its_request_front_end_or_engine() -> None:
    fleet = Fleet(SMALL, msgspec.structs.replace(SMALL, max_num_seqs=1))
    source, target = fleet.engines
    moving = [fleet.submit(0, [*PROMPT[:9], number], **LONG) for number in range(4)]
    fleet.submit(1, PROMPT, max_tokens=30, ignore_eos=True)
    fleet.clock.advance(6)
    exports = [await source.export_open(stream.request_id) for stream in moving]
    tasks = [asyncio.ensure_future(target.import_queue(e, e.key, e.epoch + 1)) for e in exports]
    await asyncio.sleep(0)
    with pytest.raises(EngineRefusal, match="already"):
        await target.import_queue(exports[0], exports[0].key, 1)
    target.abort([exports[0].key])
    # The front end submits the request there again.
    moving[1].owner, moving[1].epoch = 1, 1
    fleet.resubmit(moving[1])
    for task in tasks[:2]:
        with pytest.raises(EngineRefusal, match="dropped while it waited"):
            await task
    assert not tasks[2].done()
    target.abort_client(0)
    with pytest.raises(EngineRefusal, match="dropped"):
        await tasks[2]
    with pytest.raises(EngineRefusal, match="dropped"):
        await tasks[3]
    assert target.stats().requests == []
    fleet.submit(1, PROMPT, max_tokens=30, ignore_eos=True)
    fleet.clock.advance(2)
    last = asyncio.ensure_future(target.import_queue(exports[2], exports[2].key, 1))
    await asyncio.sleep(0)
    await target.stop()
    with pytest.raises(EngineRefusal, match="dropped"):
        await last


def test_large_blocks_are_copied_in_parts() -> None:
    """They have more bytes than are generated without yielding to the event loop."""
    large = SimulatedSettings(kv_bytes_per_token=16384, kv_blocks=64, max_model_len=1024, num_layers=4)
    fleet = Fleet(large, large)
    stream = fleet.submit(0, [7] * 500, max_tokens=100, ignore_eos=True)
    fleet.clock.advance(20)
    pause = _hand_over(fleet, stream.request_id)
    assert len(pause.block_hashes) * fleet.infos[0].kv_shape.block_bytes > 8 << 20
    now(fleet.engines[1].import_prepare(stream.request_id, pause))


# ---- start-up and utilities


def test_ready_response() -> None:
    info = Fleet(SMALL).infos[0]
    ready = read_ready(info.ready_response)
    assert (ready.num_gpu_blocks, ready.block_size, ready.max_model_len) == (24, 4, 72)
    assert info.kv_shape.block_bytes == SMALL.block_tokens * SMALL.kv_bytes_per_token


def test_utilities() -> None:
    fleet = Fleet(SMALL)
    engine = fleet.engines[0]
    for method in ("get_supported_tasks", "is_sleeping", "reset_prefix_cache", "make_coffee"):
        engine.utility(2, 77, [msgspec.msgpack.encode([0, 77, method, []])])
    answers = [
        msgspec.msgpack.decode(read_outputs(frames).utility_output)
        for _, _, frames in fleet.front_end.utilities
    ]
    assert {(client, call_id) for client, call_id, _ in fleet.front_end.utilities} == {(2, 77)}
    assert [answer[2] for answer in answers] == [[None, ["generate"]], [None, False], [None, True], None]
    assert "make_coffee" in answers[3][1]


def test_simulated_engine_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, worker_agent.engine.simulated; print({'vllm', 'torch', 'transformers'} & {*sys.modules})"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert run.stdout.strip() == "set()"


def test_impossible_settings() -> None:
    with pytest.raises(RuntimeError, match="multiple of 8"):
        SimulatedEngine(SimulatedSettings(kv_bytes_per_token=1, num_layers=3))
    with pytest.raises(RuntimeError, match="no profile"):
        SimulatedEngine(SimulatedSettings(profile="nowhere"))
    with pytest.raises(RuntimeError, match="tokenizer"):
        SimulatedEngine(SimulatedSettings(tokenizer="/nowhere"))


async def test_engine_on_a_real_event_loop() -> None:
    front_end = FrontEnd()
    engine = SimulatedEngine(msgspec.structs.replace(SMALL, speed=50.0))
    finished = asyncio.Event()

    class Sink:
        def on_step(self, columns: StepColumns) -> None:
            front_end.accept(0, columns)
            if not stream.live:
                finished.set()

        def on_utility(self, client: int, call_id: int, frames: object) -> None: ...

        def on_engine_dead(self, reason: str) -> None: ...

    await engine.start(Sink())
    frames = request_frames("r", PROMPT, max_tokens=20)
    stream = front_end.streams[1] = Stream("r", 1, frames, 0)
    engine.submit(Submission(RequestKey(0, 1), "r", 0, frames))
    async with asyncio.timeout(WAIT_S):
        await finished.wait()
    await engine.stop()
    assert stream.tokens == undisturbed(PROMPT, max_tokens=20).tokens
