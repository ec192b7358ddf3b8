"""The interface between a worker and its engine.

There are two engines: vLLM's (worker_agent/engine/vllm) and the simulated one (engine/simulated). All methods
are called from the worker's event loop. An engine that runs on its own thread forwards each call to it and
acts between two steps; it reports through the EngineSink. Token IDs are ints, lengths are in tokens, and
block numbers count from a request's first block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tailrace.cache.book import CacheBook
from tailrace.cache.names import Naming
from tailrace.cluster import Phase
from tailrace.handover import LIVE, Handover
from tailrace.model_identity import ModelIdentity
from tailrace.policy.parameters import NO_PARAMETERS, Value
from tailrace.profiles import Profile
from tailrace.records import RankRecord
from tailrace.slo import Slo
from worker_agent.engine.errors import EngineRefusal
from worker_agent.kv.address import KvShape as KvShape
from worker_agent.parallel.rank_links import RankLinks

Frames = Sequence[bytes]


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identifies a request on the data path: the front end's slot on this worker, and the request's
    handle."""

    client: int
    handle: int


@dataclass(slots=True)
class StepColumns:
    """One step's outputs for one front end: vLLM's message verbatim, and columns to check it against.

    `frames` is vLLM's EngineCoreOutputs as encoded by its msgpack encoder. Entry i of each other list belongs
    to output i of that message; `token_ids` concatenates the outputs' tokens in that order.
    """

    client: int
    step: int
    frames: list[bytes]
    handles: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    first_indices: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    # Why the only request, whose flags are FAILED, was not run.
    refusal: EngineRefusal | None = None


class EngineSink(Protocol):
    """Receives what an engine reports; must not block."""

    def on_step(self, columns: StepColumns) -> None:
        """Receive one step's outputs for one front end. Called on the engine's own thread, so that a step
        neither waits for the event loop nor wakes it (docs/decisions/0007)."""

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        """Receive the answer to Engine.utility: vLLM's EngineCoreOutputs with the utility output, verbatim.
        Called on the event loop, as are the methods below."""

    def on_engine_dead(self, reason: str) -> None:
        """React to a permanent engine failure: the worker must leave the fleet and exit."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A hint to fetch KV: the worker at `address` (HOST:PORT) probably has that of the first `tokens`."""

    instance_id: str
    address: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A request for the engine: new, or continuing after `output_token_ids` with its KV recomputed."""

    key: RequestKey
    request_id: str
    epoch: int
    # vLLM's EngineCoreRequest, verbatim frames.
    frames: Frames
    output_token_ids: Sequence[int] = ()
    traceparent: str = ""
    frontend_id: str = ""
    # Number of answering tokens among the outputs, and seconds since the first of them.
    answer_tokens: int = 0
    answering_s: float = 0.0
    # ExportedPause.sampling_state of a request that was stopped elsewhere; empty: rebuilt from the tokens.
    sampling_state: bytes = b""
    # Where to fetch the KV of the first tokens; None: compute them.
    pull: Pull | None = None
    # The request was on an engine when that died, and has made no progress since.
    suspect: bool = False
    # Version of the adapter that the request names (tailrace.model_identity); empty: any, or no adapter.
    adapter_version: str = ""
    # Seconds since the request arrived at its front end; None: not known.
    waited_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of a started engine, stored in the instance's etcd record."""

    engine: str
    model: str
    identity: ModelIdentity
    kv_shape: KvShape
    kv_blocks_total: int
    max_model_len: int
    max_num_seqs: int
    # vLLM's EngineCoreReadyResponse, msgpack.
    ready_response: bytes
    # Step times, if the engine knows its own.
    profile: Profile | None = None
    # Description of the hardware. Engines with equal models and descriptions share a measured profile.
    hardware: str = ""
    # Most tokens of a step; longer prompts take several steps.
    step_tokens: int = 2048
    # How requests are handed over to and from other engines.
    handover: Handover = LIVE
    # True: the model computes embeddings, scores and the like. False: it generates text.
    pooling: bool = False
    # Requests may name a LoRA adapter.
    takes_adapters: bool = False
    # Contents of the prefix cache and the naming of its blocks; None: no prefix cache, or it is not reported.
    cache: CacheBook | None = None
    naming: Naming | None = None
    # The engine's processes, by rank; empty: it has one device.
    ranks: Sequence[RankRecord] = ()
    # The ranks' KV, which they transfer themselves; None: use `staging`, `read_blocks` and `write_blocks`.
    ranked: RankedMemory | None = None


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request in EngineStats."""

    request_id: str
    frontend_id: str
    epoch: int
    phase: Phase
    # "waiting", "running", "paused" or "preempted".
    state: str
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int
    # Most output tokens that the request's own limit and the model's context length allow.
    max_tokens: int
    kv_blocks: int
    arrival_s: float
    token_interval_ms: float
    # The request reasons, but the intra-instance policy treats it as answering (PASCAL, section IV-C).
    demoted: bool = False
    # Blocks of a preempted request's KV in host memory.
    host_kv_blocks: int = 0
    # Predicted remaining output tokens (ARES, section 4), at most what `max_tokens` leaves; None: no
    # prediction.
    predicted_remaining_tokens: float | None = None
    # Preempted with its KV in host memory, so that it need not be recomputed.
    kv_on_host: bool = False

    @property
    def phase_tokens(self) -> int:
        """Return the tokens generated in the current phase."""
        answering = self.phase is Phase.ANSWERING
        return self.output_tokens - self.reasoning_tokens if answering else self.output_tokens


@dataclass(frozen=True, slots=True)
class Held:
    """A request that an engine holds."""

    epoch: int
    # Paused by its export, and continues when that ends.
    paused: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine, for the periodic report."""

    requests: list[RequestStats]
    kv_blocks_used: int
    kv_blocks_total: int
    host_kv_bytes_used: int
    host_kv_bytes_total: int
    prefill_backlog_tokens: int
    steps: int
    generated_tokens: int
    preemptions: int
    token_interval_ms_mean: float
    token_interval_ms_p99: float
    # Steps beside which prompts waited for the running requests to get faster (`tailrace.intra.allocate`).
    kept_back_steps: int = 0
    # Requests swapped out, swapped in, and not swapped out for want of room; corrupt blocks in host memory.
    swaps_out: int = 0
    swaps_in: int = 0
    swaps_refused: int = 0
    host_kv_corrupt_blocks: int = 0
    # Expected maximum duration of the current or next step, from recent steps (StepTimes). None: too few
    # steps of its kind so far.
    expected_step_s: float | None = None
    # How often the engine compiled code at runtime, and whether it does now: that makes a step long.
    compilations: int = 0
    compiling: bool = False
    # Prompt tokens of requests that have generated their first token here, and how many of them were found in
    # the prefix cache.
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    # Those of them that were found in host memory.
    host_cached_prompt_tokens: int = 0
    # Bytes of cached blocks in host memory, not included in `host_kv_bytes_used`; blocks stored there, loaded
    # to the device, and dropped to make room.
    host_cached_bytes: int = 0
    host_blocks_stored: int = 0
    host_blocks_loaded: int = 0
    host_blocks_dropped: int = 0
    # Why the engine's own order serves instead of the one that was set; empty: that one serves.
    order_mistake: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    """A request when its export was opened; its full blocks are pinned from then on."""

    key: RequestKey
    frontend_id: str
    epoch: int
    frames: Frames
    output_token_ids: list[int]
    phase: Phase
    traceparent: str
    # Content hash of each full block whose KV exists and can be read.
    block_hashes: list[bytes]
    # Why the request can only migrate by replay; empty: it can migrate live.
    replay_reason: str = ""
    # As in Submission.
    adapter_version: str = ""


@dataclass(frozen=True, slots=True)
class ExportedPause:
    """What remains to be handed over once the request is paused; no KV for a replay."""

    new_output_token_ids: list[int]
    # Tokens whose KV exists: all but the last sampled one.
    computed_tokens: int
    # Content hashes from the first block that the target lacks; the last one may be partial (empty hash).
    block_hashes: list[bytes]
    sampling_state: bytes
    token_interval_ms: float
    # The latest prediction of the remaining output tokens; None: no prediction.
    predicted_remaining_tokens: float | None = None
    # Seconds from the request for the pause until the current step ended.
    waited_s: float = 0.0
    # Seconds since the first answering token, or 0 without one. The source's worker sets it for the target.
    answering_for_s: float = 0.0


class Staging(Protocol):
    """A buffer that UCX sends from and receives into."""

    @property
    def buffer(self) -> object:
        """Return an object that ucxx accepts, with the buffer protocol or __cuda_array_interface__."""


class RankedMemory(Protocol):
    """What the KV transport of an engine with several ranks needs from the engine.

    Block numbers are the same in each rank. Call on the event loop only.
    """

    @property
    def links(self) -> RankLinks:
        """Return the connections to the ranks."""

    def exported(self, request_id: str, first_block: int, num_blocks: int) -> Sequence[int]:
        """Return the places of these pinned blocks of an export. Raise EngineRefusal."""

    def receiving(
        self, request_id: str, first_block: int, num_blocks: int
    ) -> AbstractContextManager[Sequence[int]]:
        """Reserve the places of these blocks of an import while they are written.

        Yield fewer places than blocks where the rest has none before the last token is known. Leaving
        without an error marks the blocks as received. Raise EngineRefusal.
        """


class Engine(Protocol):
    """One engine. For threading, see the module's docstring."""

    async def start(self, sink: EngineSink) -> EngineInfo:
        """Load the model and start stepping. Raise RuntimeError, saying what to change, if that fails."""

    async def stop(self) -> None:
        """Stop stepping and free everything."""

    def fail(self, reason: str) -> None:
        """Give the engine up, as it hangs: it steps no more, and the sink hears that it is dead."""

    # ---- the data path

    def submit(self, submission: Submission) -> None:
        """Admit a request. One that cannot run gets a FAILED output, never an exception."""

    def abort(self, keys: Sequence[RequestKey]) -> None:
        """Free these requests in any state; unknown ones are ignored."""

    def abort_client(self, client: int) -> None:
        """Free all requests of a front end whose connection broke."""

    def utility(self, client: int, call_id: int, frames: Frames) -> None:
        """Run vLLM's utility call, verbatim; the answer goes to EngineSink.on_utility."""

    def set_intra(
        self, name: str, parameters: Mapping[str, Value] = NO_PARAMETERS, slo: Slo | None = None
    ) -> None:
        """Order requests by this intra-instance policy (a name in tailrace.intra.registry) for these SLOs,
        from the next step on. One of another package is replaced by the engine's own after its first mistake.
        Raise UnknownIntraError, ParameterError."""

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine; cheap enough for every periodic report."""

    def request_stats(self, request_ids: Iterable[str]) -> list[RequestStats]:
        """Return what `stats` says of these requests, without those that the engine does not have or that are
        being imported. Takes time in proportion to their number."""

    async def find_held(self, keys: Sequence[RequestKey]) -> dict[RequestKey, Held]:
        """Return those of these requests that the engine has waiting, running or paused, not being imported.

        Submissions made before the call are included, and outputs generated before the answer have been
        delivered. Raise EngineRefusal.
        """

    # ---- source of a migration. At most one export per request; all methods may raise EngineRefusal.

    async def export_open(self, request_id: str) -> Exported:
        """Start an export and pin the request's full blocks; the request continues."""

    async def export_more(self, request_id: str, have_blocks: int) -> list[bytes]:
        """Pin the full blocks from number `have_blocks` on that exist now, and return their content
        hashes."""

    async def export_pause(self, request_id: str, have_blocks: int) -> ExportedPause:
        """Stop scheduling the request. Return after all its tokens have been delivered to the sink. Refused
        if the request has finished."""

    async def export_stop(self, request_id: str) -> ExportedPause:
        """Like export_pause, for a replay: the request need not have any KV."""

    async def export_resume(self, request_id: str) -> None:
        """Abort the export: unpin the blocks and continue the request."""

    async def export_release(self, request_id: str) -> None:
        """End the export after the target has taken over: free the request and its blocks without an
        output."""

    def staging(self, num_blocks: int) -> Staging:
        """Allocate a contiguous buffer of num_blocks * KvShape.block_bytes in the memory that holds the
        KV. Raise EngineRefusal if it has no room."""

    def staging_over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        """Wrap host memory for a whole number of blocks as staging. Return None if the KV is elsewhere."""

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        """Copy pinned blocks of an export or loan into `out`, each block layer by layer. Return one 64-bit
        checksum per block."""

    # ---- target of a migration

    async def replay_check(self, exported: Exported, key: RequestKey) -> None:
        """Check that the request could be recomputed here, starting now. Reserves nothing: the request is
        submitted after the front end has accepted.

        Raise EngineRefusal if this engine cannot run it (adapter, length), NoRoom while there is no room.
        """

    async def import_open(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        """Reserve room for the request's current tokens and one block more. Raise EngineRefusal, or NoRoom
        if there is none or other imports wait for it; then nothing is reserved."""

    async def import_queue(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        """Like import_open, but wait for room behind the imports that queued before.

        The caller sets the deadline, and calls import_drop to give up.
        """

    def import_cached(self, request_id: str) -> int:
        """Return how many leading blocks of the export were in the prefix cache when room was reserved.

        They are part of the reservation and must be neither transferred nor written. Raise EngineRefusal.
        """

    async def import_reserve(self, request_id: str, num_blocks: int) -> None:
        """Grow the reservation to hold this many blocks of KV."""

    async def write_blocks(
        self, request_id: str, first_block: int, num_blocks: int, received: Staging, checksums: Sequence[int]
    ) -> None:
        """Verify received blocks by read_blocks' checksums and copy them into the reservation.

        Raise KvCorrupt, without having written anything, if one does not match.
        """

    async def import_prepare(self, request_id: str, pause: ExportedPause) -> None:
        """Rebuild the request's tokens, sampling and grammar state after all KV has arrived. It does not run
        yet. Raise EngineRefusal, KvCorrupt."""

    async def import_activate(self, request_id: str) -> None:
        """Run the request, from the next token on, after the front end has accepted the epoch."""

    async def import_drop(self, request_id: str) -> None:
        """Abort the import: free the reservation, or stop waiting for room. Unknown requests are ignored."""

    # ---- prefixes transferred between engines. read_blocks reads the blocks of a loan, write_blocks writes
    # those of a fetch. Both take its ID instead of a request's and count its blocks from 0.

    async def submitted(self, request_id: str) -> Frames:
        """Return a request as it was submitted. Raise EngineRefusal if it is not on this engine."""

    async def loan_open(self, loan_id: str, names: Sequence[bytes]) -> int:
        """Pin the blocks of the prefix cache with these names, up to the first missing one, and return how
        many. Raise EngineRefusal."""

    async def loan_end(self, loan_id: str) -> None:
        """Unpin the blocks; unknown loans are ignored."""

    async def fetch_missing(self, submission: Submission) -> list[bytes]:
        """Return the names of the prompt's blocks after those in the prefix cache, without reserving
        anything. Raise EngineRefusal as fetch_open does."""

    async def fetch_open(self, fetch_id: str, submission: Submission, max_tokens: int) -> list[bytes]:
        """Pin the cached blocks of the request's first `max_tokens` and allocate blocks for the missing ones.

        Return the names of the missing blocks; if there are none, reserves nothing. Raise EngineRefusal if
        the request or the engine does not support fetching, NoRoom.
        """

    async def fetch_keep(self, fetch_id: str, blocks: int) -> None:
        """Add the first `blocks` received blocks to the prefix cache. Raise EngineRefusal."""

    async def fetch_drop(self, fetch_id: str) -> None:
        """Unpin the blocks; those in the prefix cache may be evicted. Unknown fetches are ignored."""
