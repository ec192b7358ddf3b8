"""Any operations on requests on two simulated engines, in any order: each yields the same tokens as without
disturbance, nothing is lost or repeated, and no block leaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.worker.simulated import SMALL, Fleet, Stream, at_boundary, now, undisturbed
from worker_agent.engine.base import Exported, ExportedPause
from worker_agent.engine.errors import EngineRefusal
from worker_agent.engine.simulated.kv import BlockPool

PROMPTS = [list(b"What is it?"), list(b"And why is it that?"), list(b"Who says so?"), list(b"x" * 41)]
SAMPLINGS: list[dict[str, object]] = [
    {"max_tokens": None, "ignore_eos": True},
    {"max_tokens": 12, "ignore_eos": True, "seed": 3},
    {"max_tokens": 30, "min_tokens": 20, "stop_token_ids": [101]},
]
_EXPECTED: dict[tuple[int, int], Stream] = {}


def _expected(prompt: int, sampling: int) -> Stream:
    if (prompt, sampling) not in _EXPECTED:
        _EXPECTED[prompt, sampling] = undisturbed(PROMPTS[prompt], **SAMPLINGS[sampling])
    return _EXPECTED[prompt, sampling]


@dataclass
class Migration:
    """One migration as its target drives it; `steps` are the remaining ones."""

    stream: Stream
    source: int
    epoch: int
    exported: Exported
    # Nothing is copied: the target recomputes the request.
    replay: bool = False
    have: int = 0
    pause: ExportedPause | None = None
    steps: list[Callable[[], None]] = field(default_factory=list)

    @property
    def target(self) -> int:
        return 1 - self.source


class TwoEngines(RuleBasedStateMachine):
    """A front end, two engines that are short of blocks, and migrations between them."""

    def __init__(self) -> None:
        super().__init__()
        scarce = {"kv_blocks": 19, "max_num_seqs": 3}
        self.fleet = Fleet(SMALL, msgspec.structs.replace(SMALL, **scarce, prefix_caching=True))
        self.streams: list[tuple[Stream, Stream]] = []
        self.migrations: list[Migration] = []
        self.aborted: list[Stream] = []

    def _live(self) -> list[Stream]:
        return [stream for stream, _ in self.streams if stream.live]

    # ---- requests

    @precondition(lambda self: len(self._live()) < 7)
    @rule(
        instance=st.integers(0, 1),
        prompt=st.integers(0, len(PROMPTS) - 1),
        sampling=st.integers(0, len(SAMPLINGS) - 1),
    )
    def submit(self, instance: int, prompt: int, sampling: int) -> None:
        stream = self.fleet.submit(instance, PROMPTS[prompt], **SAMPLINGS[sampling])
        self.streams.append((stream, _expected(prompt, sampling)))

    @rule(calls=st.integers(1, 12))
    def let_time_pass(self, calls: int) -> None:
        self.fleet.clock.advance(calls)

    @precondition(lambda self: len(self._live()) > 4)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self._live()))
        stream.failed = True
        self.aborted.append(stream)
        for engine in self.fleet.engines:
            engine.abort([self.fleet.key(stream)])

    @precondition(lambda self: self._live())
    @rule(data=st.data(), instance=st.integers(0, 1), abort_first=st.booleans())
    def recover(self, data: st.DataObject, instance: int, abort_first: bool) -> None:
        """Submit a request again with its accepted tokens, as if its instance had been lost."""
        stream = data.draw(st.sampled_from(self._live()))
        if abort_first or stream.owner != instance:
            self.fleet.engines[stream.owner].abort([self.fleet.key(stream)])
        stream.owner = instance
        stream.epoch += 1
        self.fleet.resubmit(stream)

    # ---- migrations

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        self._open(data.draw(st.sampled_from(self._live())), data.draw(st.booleans()))

    @precondition(lambda self: self._live())
    @rule(data=st.data(), waits=st.lists(st.integers(0, 5), min_size=2, max_size=5))
    def migrate(self, data: st.DataObject, waits: list[int]) -> None:
        """Run a whole migration, with some time between its steps."""
        stream = data.draw(st.sampled_from(self._live()))
        opened = self._open(stream, data.draw(st.booleans()))
        if opened is None:
            return
        *rounds, before_pause = waits
        for calls in rounds:
            self.fleet.clock.advance(calls)
            if opened in self.migrations:
                self._copy_a_round(opened)
        self.fleet.clock.advance(before_pause)
        if opened in self.migrations:
            self._pause(opened)
        if opened in self.migrations:
            self.fleet.clock.advance(before_pause)
            self._adopt(opened)

    def _open(self, stream: Stream, replay: bool) -> Migration | None:
        source = self.fleet.engines[stream.owner]
        try:
            exported = now(source.export_open(stream.request_id))
        except EngineRefusal:
            return None
        migration = Migration(stream, stream.owner, stream.epoch + 1, exported, replay)
        target, key = self.fleet.engines[migration.target], self.fleet.key(stream)
        try:
            now(
                target.replay_check(exported, key)
                if replay
                else target.import_open(exported, key, migration.epoch)
            )
        except EngineRefusal:
            now(source.export_resume(stream.request_id))
            return None
        if not replay:
            migration.have = target.import_cached(stream.request_id)
        self.migrations.append(migration)
        return migration

    @precondition(lambda self: self.migrations)
    @rule(data=st.data())
    def copy_a_round(self, data: st.DataObject) -> None:
        migration = data.draw(st.sampled_from(self.migrations))
        if migration.pause is None:
            self._copy_a_round(migration)

    def _copy_a_round(self, migration: Migration) -> None:
        if migration.replay:
            return
        request_id = migration.stream.request_id
        try:
            source = self.fleet.engines[migration.source]
            added = now(source.export_more(request_id, migration.have))
            self._copy(migration, len(added))
        except EngineRefusal:
            self._give_up(migration)

    @precondition(lambda self: self.migrations)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        migration = data.draw(st.sampled_from(self.migrations))
        if migration.pause is None:
            self._pause(migration)

    def _pause(self, migration: Migration) -> None:
        request_id = migration.stream.request_id
        try:
            source = self.fleet.engines[migration.source]
            migration.pause = at_boundary(
                self.fleet.clock,
                source.export_stop(request_id)
                if migration.replay
                else source.export_pause(request_id, migration.have),
            )
            self._copy(migration, len(migration.pause.block_hashes))
        except EngineRefusal:
            self._give_up(migration)
            return
        if migration.replay:
            return
        try:
            now(self.fleet.engines[migration.target].import_prepare(request_id, migration.pause))
        except EngineRefusal:
            # Possible only because the request was submitted again meanwhile.
            assert migration.stream.epoch >= migration.epoch or not migration.stream.live
            self._give_up(migration)

    @precondition(lambda self: any(migration.pause for migration in self.migrations))
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        self._adopt(data.draw(st.sampled_from([each for each in self.migrations if each.pause])))

    def _adopt(self, migration: Migration) -> None:
        stream, pause = migration.stream, migration.pause
        assert pause is not None
        handed_over = migration.exported.output_token_ids + pause.new_output_token_ids
        if not stream.live or stream.epoch != migration.epoch - 1:
            self._give_up(migration)
            return
        assert handed_over == stream.tokens, "the pause must follow all delivered tokens"
        stream.owner, stream.epoch = migration.target, migration.epoch
        if migration.replay:
            self.fleet.resubmit(stream, pause.sampling_state)
        else:
            now(self.fleet.engines[migration.target].import_activate(stream.request_id))
        now(self.fleet.engines[migration.source].export_release(stream.request_id))
        self.migrations.remove(migration)

    @precondition(lambda self: self.migrations)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self._give_up(data.draw(st.sampled_from(self.migrations)))

    def _copy(self, migration: Migration, blocks: int) -> None:
        if not blocks:
            return
        source, target = self.fleet.engines[migration.source], self.fleet.engines[migration.target]
        request_id = migration.stream.request_id
        staging = source.staging(blocks)
        checksums = now(source.read_blocks(request_id, migration.have, blocks, staging))
        now(target.import_reserve(request_id, migration.have + blocks))
        now(target.write_blocks(request_id, migration.have, blocks, staging, checksums))
        migration.have += blocks

    def _give_up(self, migration: Migration) -> None:
        now(self.fleet.engines[migration.target].import_drop(migration.stream.request_id))
        now(self.fleet.engines[migration.source].export_resume(migration.stream.request_id))
        self.migrations.remove(migration)

    # ---- invariants

    @invariant()
    def every_block_is_free_or_held_once(self) -> None:
        for engine in self.fleet.engines:
            held = [block for request in engine._table for block in request.blocks]
            assert len(held) == len(set(held)) == engine._pool.used
            assert sorted([*held, *engine._pool.free_blocks()]) == list(range(engine._pool.total))

    @invariant()
    def kv_covers_what_is_computed(self) -> None:
        for engine in self.fleet.engines:
            scheduler = engine._scheduler
            assert scheduler.free_slots >= 0
            for request in engine._table:
                assert request.total == len(request.prompt) + len(request.outputs)
                assert request.computed < request.total
                swapped = scheduler.host.get(request.request_id)
                if swapped is None:
                    assert request.computed <= len(request.blocks) * SMALL.block_tokens
                else:
                    assert not request.blocks and request.computed <= swapped.tokens

    @invariant()
    def streams_are_prefixes_of_the_expected_ones(self) -> None:
        for stream, expected in self.streams:
            assert stream.tokens == expected.tokens[: len(stream.tokens)]

    def teardown(self) -> None:
        for migration in list(self.migrations):
            self._give_up(migration)
        self.fleet.clock.drain()
        for stream, expected in self.streams:
            if stream.finish is not None:
                assert stream.tokens == expected.tokens
                assert stream.finish == expected.finish
            else:
                assert stream.failed, "it was never finished"
                assert stream in self.aborted
        for engine in self.fleet.engines:
            assert engine.stats().requests == []
            assert engine.stats().kv_blocks_used == 0


TestTwoEngines = TwoEngines.TestCase
TestTwoEngines.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12), st.booleans()), max_size=60))
def test_pool_never_gives_a_block_twice(steps: list[tuple[int, int, bool]]) -> None:
    names = [bytes([number]) for number in range(12)]
    pool = BlockPool(20, 4)
    holders: list[list[int]] = [[] for _ in range(5)]
    for holder, blocks, named in steps:
        held = holders[holder]
        before, free = list(held), pool.free
        if blocks == 0:
            pool.release(held, names[: len(held)] if named else ())
            assert held == []
        elif named and not held:
            found = pool.take_named(held, names[:blocks])
            assert found == len(held) <= blocks
        elif pool.grow(held, blocks):
            assert held[: len(before)] == before
            assert len(held) == max(blocks, len(before))
        else:
            assert blocks - len(before) > free
            assert held == before
        everything = [block for each in holders for block in each]
        assert len(everything) == len(set(everything)) == pool.used
        assert sorted([*everything, *pool.free_blocks()]) == list(range(20))
        assert pool.used + pool.free == 20
