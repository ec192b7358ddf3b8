"""The simulated engine under every order and with host memory of any size yields the same tokens."""

from __future__ import annotations

import msgspec
import pytest

from tailrace.intra import registry
from tailrace.intra.base import FEWEST_DECODING
from tailrace.intra.earliest_due import EarliestDue
from tailrace.intra.registry import intra_names
from tests.worker.orders import ByLength, Mistaken, Stingy
from tests.worker.simulated import SMALL, Fleet, Stream, at_boundary, now, undisturbed
from worker_agent.engine.base import Exported, ExportedPause
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.simulated import SimulatedEngine, SimulatedSettings

PROMPT = [*b"Which of the two was the longer one?"]
LENGTH = 40
# At the profile's 131,072 bytes per token.
BLOCK_BYTES = SMALL.block_tokens * 131_072


def small(host_blocks: int) -> SimulatedSettings:
    return msgspec.structs.replace(SMALL, host_kv_bytes=host_blocks * BLOCK_BYTES)


def prompts(number: int) -> list[list[int]]:
    return [[*PROMPT[:20], n] for n in range(number)]


def submit(fleet: Fleet, number: int) -> list[Stream]:
    return [fleet.submit(0, prompt, max_tokens=LENGTH, ignore_eos=True) for prompt in prompts(number)]


def check(streams: list[Stream]) -> None:
    for stream, prompt in zip(streams, prompts(len(streams)), strict=True):
        assert stream.tokens == undisturbed(prompt, max_tokens=LENGTH, ignore_eos=True).tokens


def nothing_left(engine: SimulatedEngine) -> None:
    stats = engine.stats()
    assert (stats.kv_blocks_used, stats.host_kv_bytes_used, stats.requests) == (0, 0, [])


@pytest.mark.parametrize("host_blocks", [0, 12, 1000])
@pytest.mark.parametrize("intra", intra_names())
def test_answers_do_not_depend_on_order_or_memory(intra: str, host_blocks: int) -> None:
    fleet = Fleet(small(host_blocks))
    engine = fleet.engines[0]
    engine.set_intra(intra)
    streams = submit(fleet, 6)
    fleet.clock.drain()
    check(streams)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.swaps_out > 0) == (host_blocks > 0)
    assert stats.swaps_in == stats.swaps_out
    nothing_left(engine)


@pytest.mark.parametrize("ranks", [0, 1, 5, 7])
def test_an_order_with_a_mistake_costs_its_order_alone(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = {**registry.INTRA_POLICIES, "mine": type("Mine", (Mistaken,), {"ranks": ranks})}
    monkeypatch.setattr(registry, "INTRA_POLICIES", orders)
    fleet = Fleet(small(12))
    engine = fleet.engines[0]
    engine.set_intra("mine")
    streams = submit(fleet, 6)
    fleet.clock.drain()
    check(streams)
    assert engine.stats().order_mistake.startswith("rank: ZeroDivisionError: a mistake (orders.py:")
    nothing_left(engine)
    engine.set_intra("pascal")
    assert not engine.stats().order_mistake


def test_after_a_mistake_requests_are_served_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = {**registry.INTRA_POLICIES, "mine": type("Mine", (Mistaken,), {"ranks": 3})}
    monkeypatch.setattr(registry, "INTRA_POLICIES", orders)
    fleet = Fleet(msgspec.structs.replace(SMALL, max_num_seqs=1))
    fleet.engines[0].set_intra("mine")
    # The longest first, which that order would serve last; the fourth is one more than it bears.
    streams = [fleet.submit(0, PROMPT[:length], max_tokens=2) for length in (20, 10, 5, 30)]
    assert fleet.engines[0].stats().order_mistake
    ended: list[Stream] = []
    while len(ended) < len(streams):
        fleet.clock.advance(1)
        ended += [stream for stream in streams if not stream.live and stream not in ended]
    assert ended == streams


def test_order_can_change_under_load() -> None:
    fleet = Fleet(small(30))
    streams = submit(fleet, 6)
    for intra in ["pascal", "vllm", "round_robin", "decode_first", "fcfs", "vllm"]:
        fleet.engines[0].set_intra(intra)
        fleet.clock.advance(12)
    fleet.clock.drain()
    check(streams)
    nothing_left(fleet.engines[0])


def swapped(fleet: Fleet, streams: list[Stream]) -> Stream:
    """Return a stream whose KV is in host memory."""
    while not fleet.engines[0].stats().host_kv_bytes_used:
        assert fleet.clock.advance(1)
    states = {request.request_id: request.state for request in fleet.engines[0].stats().requests}
    return next(stream for stream in streams if states.get(stream.request_id) == "preempted")


def take(fleet: Fleet, engine: SimulatedEngine, request_id: str) -> tuple[Exported, ExportedPause]:
    exported = now(engine.export_open(request_id))
    return exported, at_boundary(fleet.clock, engine.export_pause(request_id, 0))


def bring(
    source: SimulatedEngine,
    target: SimulatedEngine,
    fleet: Fleet,
    stream: Stream,
    both: tuple[Exported, ExportedPause],
) -> None:
    """Import a request with all its blocks at once."""
    exported, pause = both
    now(target.import_open(exported, fleet.key(stream), stream.epoch + 1))
    count = len(pause.block_hashes)
    now(target.import_reserve(stream.request_id, count))
    staging = source.staging(count)
    sums = now(source.read_blocks(stream.request_id, 0, count, staging))
    now(target.write_blocks(stream.request_id, 0, count, staging, sums))
    now(target.import_prepare(stream.request_id, pause))


def test_swapped_request_can_move_or_stay() -> None:
    fleet = Fleet(small(30), small(30))
    source, target = fleet.engines
    streams = submit(fleet, 4)
    stream = swapped(fleet, streams)
    take(fleet, source, stream.request_id)
    assert "paused" in {request.state for request in source.stats().requests}
    now(source.export_resume(stream.request_id))
    stream = swapped(fleet, streams)
    bring(source, target, fleet, stream, take(fleet, source, stream.request_id))
    stream.epoch += 1
    stream.owner = 1
    now(target.import_activate(stream.request_id))
    now(source.export_release(stream.request_id))
    fleet.clock.drain()
    check(streams)
    nothing_left(source)
    nothing_left(target)


def test_import_waits_in_host_memory_if_the_order_requires_it() -> None:
    fleet = Fleet(small(30), small(30))
    source, target = fleet.engines
    (stream,) = submit(fleet, 1)
    fleet.clock.advance(8)
    both = take(fleet, source, stream.request_id)
    # The maximum number of running requests fills the target.
    others = [
        fleet.submit(1, [*PROMPT, n], max_tokens=30, ignore_eos=True) for n in range(SMALL.max_num_seqs)
    ]
    fleet.clock.advance(8)
    with pytest.raises(EngineRefusal):
        bring(source, target, fleet, stream, both)
    target.set_intra("pascal")
    bring(source, target, fleet, stream, both)
    now(target.import_drop(stream.request_id))
    bring(source, target, fleet, stream, both)
    stream.epoch += 1
    stream.owner = 1
    now(target.import_activate(stream.request_id))
    now(source.export_release(stream.request_id))
    fleet.clock.drain()
    assert target.stats().swaps_in > 0
    check([stream])
    assert all(not other.live for other in others)
    nothing_left(source)
    nothing_left(target)


def test_prompt_overtakes_one_that_has_begun() -> None:
    fleet = Fleet(small(0))
    engine = fleet.engines[0]
    engine._scheduler.use_policy(ByLength())
    chunk = SMALL.max_num_batched_tokens
    long = fleet.submit(0, [*range(64)], max_tokens=2)
    while engine.stats().prefill_backlog_tokens > 63 - chunk:
        assert fleet.clock.advance(1)
    # The next step has already begun without it.
    short = fleet.submit(0, [*range(12)], max_tokens=1)
    while short.live:
        assert not long.tokens and fleet.clock.advance(1)
    # The long prompt got the rest of the short one's step.
    assert engine.stats().prefill_backlog_tokens == 63 - 2 * chunk - (chunk - 12)
    fleet.clock.drain()
    assert len(long.tokens) == 2


def test_prompt_waits_while_tokens_come_too_far_apart() -> None:
    fleet = Fleet(msgspec.structs.replace(SMALL, kv_blocks=2_000, max_model_len=4_000, max_num_seqs=8))
    engine = fleet.engines[0]
    decoding = [
        fleet.submit(0, [*PROMPT[:20], n], max_tokens=2_000, ignore_eos=True) for n in range(FEWEST_DECODING)
    ]
    long = decoding[-1]
    while len(long.tokens) < 1_000:
        assert fleet.clock.advance(1)
    mean_s = engine.stats().token_interval_ms_mean / 1e3

    def limit(interval_s: float) -> None:
        # The requests arrived in 1970, and are not late.
        order = EarliestDue(ttft_slo_s=1e12, late_s=1e13, tpot_slo_s=10.0 * interval_s, tpot_limit=0.1)
        engine._scheduler.use_policy(order)

    limit(0.9 * mean_s)
    short = fleet.submit(0, PROMPT[:20], max_tokens=5)
    while len(long.tokens) < 1_300:
        assert fleet.clock.advance(1) and not short.tokens
    kept_back = engine.stats().kept_back_steps
    assert kept_back > 0
    # For fewer, none waits.
    fleet.engines[0].abort([fleet.key(decoding[0])])
    while short.live:
        assert fleet.clock.advance(1) and long.live
    decoding[0] = fleet.submit(0, [*PROMPT[:20], 99], max_tokens=2_000, ignore_eos=True)
    short = fleet.submit(0, PROMPT[:20], max_tokens=5)
    while len(long.tokens) < 1_500:
        assert fleet.clock.advance(1) and not short.tokens
    limit(1.1 * mean_s)
    while short.live:
        assert fleet.clock.advance(1) and long.live
    fleet.clock.drain()


def test_recomputation_yields_no_token_before_its_end() -> None:
    fleet = Fleet(small(0), small(0))
    stream = fleet.submit(0, PROMPT, max_tokens=10)
    while len(stream.tokens) < 4:
        assert fleet.clock.advance(1)
    fleet.engines[0].abort([fleet.key(stream)])
    engine, known = fleet.engines[1], len(stream.tokens)
    engine._scheduler.use_policy(Stingy(1))
    stream.owner, stream.epoch = 1, 1
    fleet.resubmit(stream)
    while len(stream.tokens) == known:
        assert fleet.clock.advance(1)
    # The step that computes the last of them generates the next token.
    assert engine.stats().steps == len(PROMPT) + known
    fleet.clock.drain()
    assert stream.tokens == undisturbed(PROMPT, max_tokens=10).tokens
