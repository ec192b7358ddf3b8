"""The engine thread: vLLM's engine core, its loop, and an inbox for commands."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from vllm.v1.engine import EngineCoreOutputs, UtilityOutput, UtilityResult
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tailrace.intra.base import IntraPolicy, JobView, Rank, TokenIntervals
from worker_agent.engine.base import Frames, StepColumns
from worker_agent.engine.errors import EngineSettingError
from worker_agent.engine.step_order import StepOrder
from worker_agent.engine.turns import Turn, serving_phase
from worker_agent.engine.vllm.cache_watch import CacheWatch
from worker_agent.engine.vllm.exports import VllmExports
from worker_agent.engine.vllm.imports import ReservedImport, VllmImports
from worker_agent.engine.vllm.load import LoadedCore
from worker_agent.engine.vllm.lockstep import Lockstep, prepare_data_parallel
from worker_agent.engine.vllm.outputs import OutputWriter
from worker_agent.engine.vllm.pinned import Fetch, Fetches, Pinned, VllmLoans
from worker_agent.engine.vllm.predictions import LengthWatch
from worker_agent.engine.vllm.requests import VllmRequest, VllmRequests
from worker_agent.engine.vllm.settings import vllm_config
from worker_agent.engine.vllm.submissions import Submissions
from worker_agent.settings import EngineOptions

_log = logging.getLogger(__name__)

# Delay after a step that could schedule nothing (no memory, or a grammar is being compiled).
_IDLE_STEP_DELAY_S = 0.001
# The event loop and this thread contend for the GIL. At the default of 5 ms, each switch would cost more than
# a step of a small model.
_SWITCH_INTERVAL_S = 0.0005

Command = Callable[[], None]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The objects that the engine thread owns."""

    core: LoadedCore
    table: VllmRequests
    writer: OutputWriter
    submissions: Submissions
    exports: VllmExports
    imports: VllmImports
    loans: VllmLoans
    fetches: Fetches
    utility: VllmUtilities
    watch: LengthWatch | None
    # None if the engine has no prefix cache.
    cache: CacheWatch | None

    def read(self, name: str) -> Pinned:
        """Return the pinned blocks of the export or loan with this ID. Any thread. Raises EngineRefusal."""
        return self.exports.find(name) or self.loans.find(name) or self.exports.get(name)

    def written(self, name: str) -> ReservedImport | Fetch:
        """Return the import or fetch with this ID, for writing. Any thread. Raises EngineRefusal."""
        return self.imports.find(name) or self.fetches.find(name) or self.imports.get(name)


class EngineThread:
    """Runs commands between steps, and steps while there is work. Otherwise blocks on the inbox."""

    def __init__(
        self,
        options: EngineOptions,
        deliver: Callable[[list[StepColumns]], None],
        died: Callable[[str], None],
    ) -> None:
        """`deliver` is called on the engine thread. `died` is called there or on the thread that watches
        other data-parallel ranks; its first call counts."""
        self._options = options
        self._deliver = deliver
        self._died = died
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._started: Future[EngineParts] = Future()
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._stopping = False
        # With other data-parallel ranks; set once by the engine thread.
        self._lockstep: Lockstep | None = None

    def start(self) -> Future[EngineParts]:
        """Load the model on the engine thread, because vLLM pins the loading thread to its cores."""
        self._thread.start()
        return self._started

    def post(self, command: Command) -> None:
        """Run `command` between two steps. Any thread. An exception ends the engine."""
        self._inbox.put(command)

    def stop(self, timeout_s: float) -> bool:
        """End the loop and free everything; return False if that takes longer than `timeout_s`. Blocks."""

        def end() -> None:
            self._stopping = True

        if self._thread.ident is None:
            # It was never started.
            return True
        self.post(end)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- engine thread

    def _run(self) -> None:
        try:
            parts = self._load()
        except EngineSettingError as error:
            # For an operator, who needs the line and not the stack.
            _log.debug("the vLLM engine did not start", exc_info=error)
            self._fail_start(error)
            return
        except Exception as error:  # noqa: BLE001 - thread boundary: passed to the caller of `start`
            if not self._lost_peer():
                _log.exception("the vLLM engine did not start")
                self._fail_start(error)
            return
        try:
            self._started.set_result(parts)
        except InvalidStateError:
            _log.debug("a peer was lost while the vLLM engine started")
            return
        try:
            while not self._stopping:
                self._run_once(parts)
            if parts.watch is not None:
                parts.watch.close()
            if self._lockstep is not None:
                self._lockstep.close("was stopped")
            parts.core.core.shutdown()
            if self._lockstep is not None:
                self._lockstep.free()
        except Exception as error:  # noqa: BLE001 - thread boundary: reported as the engine's death
            if self._lost_peer():
                _log.debug("a step failed without a peer", exc_info=error)
                return
            _log.exception("the vLLM engine failed")
            reason = f"{type(error).__name__}: {error}"
            if self._lockstep is not None:
                self._lockstep.close(f"has failed ({reason})")
            self._died(reason)

    def _fail_start(self, error: Exception) -> None:
        if self._lockstep is not None:
            self._lockstep.close("did not start")
        try:
            self._started.set_exception(error)
        except InvalidStateError:
            # The loss of a peer was reported first.
            _log.debug("the vLLM engine did not start either", exc_info=error)

    def _lost_peer(self) -> str:
        return "" if self._lockstep is None else self._lockstep.lost_peer()

    def _lose_peer(self, reason: str) -> None:
        """Report the loss of a data-parallel rank, called on the thread of the links. The engine thread may
        wait in a collective for the lost rank, without end on a GPU."""
        try:
            self._started.set_exception(RuntimeError(reason))
        except InvalidStateError:
            self._died(reason)

    def _load(self) -> EngineParts:
        config = vllm_config(self._options)
        if prepare_data_parallel(config):
            self._lockstep = Lockstep(config, self.post, self._lose_peer)
        core = LoadedCore(config, self._options.host_kv_bytes, self._lockstep)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        if core.ranked and self._options.predictor:
            _log.warning("lengths are not predicted on an engine of %d ranks", len(core.ranks))
        if core.no_host_tier_reason:
            _log.info("evicted prefixes are not cached in host memory: %s", core.no_host_tier_reason)
        table = VllmRequests()
        writer = OutputWriter(table)
        imports = VllmImports(core, table, self.post)
        parts = EngineParts(
            core=core,
            table=table,
            writer=writer,
            submissions=Submissions(core, table, imports, writer, self._deliver),
            exports=VllmExports(core, table, self.post),
            imports=imports,
            loans=VllmLoans(core, self.post),
            fetches=Fetches(core, self.post),
            utility=VllmUtilities(core),
            # Hidden states can only be observed in the process that computes them.
            watch=None
            if core.pooling or core.ranked
            else LengthWatch.of(self._options.predictor, core, table),
            cache=None if core.pooling else CacheWatch.of(core),
        )

        def step_now() -> None:
            self._step(parts)

        core.step_now = step_now
        return parts

    def _run_once(self, parts: EngineParts) -> None:
        poll_s = parts.core.grammars.poll()
        if not parts.core.busy:
            self._wait(poll_s)
        self._run_commands()
        parts.imports.admit()
        if parts.core.busy and not self._stopping and not self._step(parts):
            self._wait(_IDLE_STEP_DELAY_S)

    def _step(self, parts: EngineParts) -> bool:
        """Step, in lockstep with other data-parallel ranks if there are any; return False if there was
        nothing to do."""
        if self._lockstep is None:
            return self._step_engine(parts)[1]
        self._lockstep.begin(parts.core.core)
        executed, progressed = self._step_engine(parts) if parts.core.has_work else (False, False)
        return self._lockstep.end(parts.core.core, executed) or progressed

    def _step_engine(self, parts: EngineParts) -> tuple[bool, bool]:
        """Begin a step, complete one, or both; return whether it ran a forward pass, and whether there was
        anything to do."""
        core = parts.core.core
        if parts.watch is not None:
            parts.watch.before_step()
        began_s = time.monotonic()
        outputs, executed = core.step_fn()
        core.post_step(executed)
        if outputs is None:
            # The first step of a pipeline has begun, and none has ended yet.
            return bool(executed), bool(executed)
        parts.core.after_step()
        parts.writer.times.add(time.monotonic() - began_s, parts.core.scheduler.processed_tokens)
        columns = parts.writer.step(outputs)
        if columns:
            self._deliver(columns)
        parts.exports.on_step_end()
        parts.loans.on_step_end()
        return bool(executed), bool(executed or columns)

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for the next command, at most `timeout_s` (None: without limit), and run it."""
        try:
            command = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        command()

    def _run_commands(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()


def use_policy(policy: IntraPolicy | None, parts: EngineParts) -> None:
    """Order requests by this policy, or as vLLM does if None. Engine thread, between two steps."""
    parts.core.intra = policy
    parts.core.scheduler.use_order(None if policy is None else _step_order(policy, parts))


def _step_order(policy: IntraPolicy, parts: EngineParts) -> StepOrder[Request]:
    core, table, recent = parts.core, parts.table, parts.writer.intervals

    def entry_of(request: Request) -> VllmRequest:
        entry = table.get(request.request_id)
        # Between commands, the table has every request that the scheduler has.
        assert entry is not None
        return entry

    def turn_of(request: Request) -> Turn:
        return entry_of(request).turn

    def rank(request: Request) -> Rank:
        entry = entry_of(request)
        turn, outputs = entry.turn, request.num_output_tokens
        if not turn.is_current(policy, serving_phase(outputs, entry.phases.reasons), outputs):
            turn.update(policy, entry.view)
        return turn.rank

    def held_blocks(request: Request) -> int:
        return len(core.blocks_of(request.request_id))

    def swapped(request: Request) -> bool:
        return core.host.get(request.request_id) is not None

    def exempt(request: Request) -> bool:
        # KV that is not verified yet must not be swapped out: its new checksums would make it seem valid.
        scheduler, request_id = core.scheduler, request.request_id
        return request_id in scheduler.exporting or request_id in scheduler.unverified

    def view(request: Request) -> JobView:
        return entry_of(request).view

    def intervals() -> TokenIntervals | None:
        return recent.summary(time.monotonic(), time.time())

    return StepOrder(policy, core.block_tokens, rank, turn_of, held_blocks, swapped, exempt, view, intervals)


# Accepted but not executed: adapters are evicted as needed, because each API server has its own numbering.
_ACCEPTED_ONLY = frozenset({"remove_lora", "pin_lora"})


# Calls that only read or clear a cache, or load adapters; not those that would stop, pause or reload an
# engine that other front ends share.
ALLOWED = frozenset(
    {
        "add_lora",
        "get_kv_cache_group_metadata",
        "get_supported_tasks",
        "get_weight_version",
        "is_scheduler_paused",
        "is_sleeping",
        "list_loras",
        "pin_lora",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "reset_prefix_cache",
    }
)


class VllmUtilities:
    """Runs utility calls on the engine thread, as vLLM's engine core process does."""

    def __init__(self, core: LoadedCore) -> None:
        self._core = core
        self._decoder = MsgpackDecoder()
        self._encoder = MsgpackEncoder()

    def call(self, call_id: int, frames: Frames) -> list[bytes]:
        """Run a call, encoded as (client index, call ID, method, arguments), and return vLLM's encoded
        EngineCoreOutputs with the result or the failure."""
        output = UtilityOutput(call_id)
        try:
            _, output.call_id, method, arguments = self._decoder.decode(frames)
            output.result = UtilityResult(self._run(method, arguments))
        # As in vLLM, any failure is reported to the caller.
        except Exception as error:  # noqa: BLE001
            _log.exception("utility call %d failed", call_id)
            output.failure_message = f"Call failed: {error}"
        return [bytes(frame) for frame in self._encoder.encode(EngineCoreOutputs(utility_output=output))]

    def _run(self, method: str, arguments: Sequence[object]) -> object:
        if method not in ALLOWED:
            raise PermissionError(f"{method} is not available on a fleet's worker")
        bound = getattr(self._core.core, method)
        arguments = EngineCoreProc._convert_msgspec_args(bound, arguments)
        if method == "add_lora":
            return bool(self._core.adapters.load(*arguments))
        if method in _ACCEPTED_ONLY:
            return True
        return bound(*arguments)
