"""The interface between a worker and its engine.

Two engines stand behind it: vLLM's (worker_agent/engine/vllm) and the simulated one (engine/simulated).
All methods are called from the worker's event loop. An engine that runs in a thread of its own carries
each call over to it and acts between two steps; what it reports comes through the EngineSink. Token ids are
ints; lengths are in tokens; block numbers count from a request's first block.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tailrace.cache.book import CacheBook
from tailrace.cache.names import Naming
from tailrace.handover import LIVE, Handover
from tailrace.model_identity import ModelIdentity
from tailrace.policy.parameters import NO_PARAMETERS, Value
from tailrace.profiles import Profile
from tailrace.records import RankRecord
from tailrace.slo import Slo
from worker_agent.kv.address import KvShape as KvShape
from worker_agent.ranks.ranked_memory import RankedMemory

Frames = Sequence[bytes]


class EnginePhase(enum.Enum):
    """Phase of a request on this engine (the words of tailrace.cluster.Phase)."""

    PREFILL = "prefill"
    REASONING = "reasoning"
    ANSWERING = "answering"


class OutputFlag(enum.IntFlag):
    """Flags of one request's outputs in one step; the values of the proto enum.

    A request that does not reason has PREFILL_DONE and REASONING_ENDED together: its first token answers. One
    that did has ANSWER_BEGUN with the token after the one that ended its reasoning.
    """

    NONE = 0
    FINISHED = 1
    PREFILL_DONE = 2
    REASONING_ENDED = 4
    FAILED = 8
    ANSWER_BEGUN = 16


@dataclass(frozen=True, slots=True)
class RequestKey:
    """(front end's slot on this worker, handle): names a request on the data path."""

    client: int
    handle: int


@dataclass(slots=True)
class StepColumns:
    """One step's outputs for one front end: vLLM's message verbatim, and columns to check it by.

    `frames` is vLLM's EngineCoreOutputs as its msgpack encoder made it. Entry i of every other list
    belongs to output i of that message; `token_ids` is the concatenation in that order.
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


class EngineSink(Protocol):
    """Where an engine delivers; must not block."""

    def on_step(self, columns: StepColumns) -> None:
        """One step's outputs for one front end. Called on the engine's own thread: a step is not to wait for
        the event loop, nor to wake it (docs/decisions/0007)."""

    def on_utility(self, client: int, call_id: int, frames: Frames) -> None:
        """Answer to Engine.utility: vLLM's EngineCoreOutputs with the utility output, verbatim. On the event
        loop, as everything below."""

    def on_engine_dead(self, reason: str) -> None:
        """The engine failed for good; the worker must leave the fleet and exit."""


@dataclass(frozen=True, slots=True)
class Pull:
    """The worker at `address` (HOST:PORT) holds KV of a request's first `tokens`, as far as is known."""

    instance_id: str
    address: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A request for the engine: new, or going on after output_token_ids with its KV to be computed anew."""

    key: RequestKey
    request_id: str
    epoch: int
    # vLLM's EngineCoreRequest, verbatim frames.
    frames: Frames
    output_token_ids: Sequence[int] = ()
    traceparent: str = ""
    frontend_id: str = ""
    # Answering tokens among the outputs, and the seconds since the first of them.
    answer_tokens: int = 0
    answering_s: float = 0.0
    # Of a request that was stopped elsewhere (ExportedPause.sampling_state); empty: made from the tokens.
    sampling_state: bytes = b""
    # Who has the KV of its first tokens; None: nobody that it should come from.
    pull: Pull | None = None
    # It was on an engine when that died, and has not got on since.
    suspect: bool = False
    # Of the adapter that it names (tailrace.adapter_versions); empty: any, or it names none.
    adapter_version: str = ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine is; goes into the instance's etcd record."""

    engine: str
    model: str
    kv_shape: KvShape
    kv_blocks_total: int
    max_model_len: int
    max_num_seqs: int
    # vLLM's EngineCoreReadyResponse, msgpack.
    ready_response: bytes
    # Step times, where the engine knows its own.
    profile: Profile | None = None
    # What it runs on, in words: engines of one model on equal hardware have one measured profile.
    hardware: str = ""
    # Most tokens of a step: longer prompts take several.
    step_tokens: int = 2048
    # Which model it is; None: the engine does not say.
    identity: ModelIdentity | None = None
    # How its requests go to other engines, and come from them.
    handover: Handover = LIVE
    # It runs embedding, scoring and the like; False: it generates text.
    pooling: bool = False
    # Requests may name a LoRA adapter.
    takes_adapters: bool = False
    # What its prefix cache holds, and how blocks are named there; None: it keeps none, or does not tell.
    cache: CacheBook | None = None
    naming: Naming | None = None
    # Processes that run it together, by rank; none: it has one device.
    ranks: Sequence[RankRecord] = ()
    # Their KV, which they move themselves; None: `staging`, `read_blocks` and `write_blocks` do.
    ranked: RankedMemory | None = None


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request for the steady report."""

    request_id: str
    frontend_id: str
    epoch: int
    phase: EnginePhase
    # "waiting", "running", "paused" or "preempted".
    state: str
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int
    # Most output tokens that it may make: as asked for, and as the model's longest context allows.
    max_tokens: int
    kv_blocks: int
    arrival_s: float
    token_interval_ms: float
    # It reasons, and the engine's order of requests treats it as answering (PASCAL, section IV-C).
    demoted: bool = False
    # KV in host memory of a preempted request.
    host_kv_blocks: int = 0
    # Predicted output tokens still to come (ARES, section 4), no more than `max_tokens` leaves. None: nobody
    # predicts.
    predicted_remaining_tokens: float | None = None
    # Preempted, and its KV is in host memory: it need not be computed anew.
    kv_on_host: bool = False

    @property
    def phase_tokens(self) -> int:
        """Tokens made in the present phase."""
        answering = self.phase is EnginePhase.ANSWERING
        return self.output_tokens - self.reasoning_tokens if answering else self.output_tokens


@dataclass(frozen=True, slots=True)
class Held:
    """A request that an engine has."""

    epoch: int
    # Stopped for its export; it goes on when that ends.
    paused: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment, for the steady report."""

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
    # Requests whose KV went to host memory, came back from it, and found no room there; blocks of host memory
    # that were not what they ought to be.
    swaps_out: int = 0
    swaps_in: int = 0
    swaps_refused: int = 0
    host_kv_corrupt_blocks: int = 0
    # The longest that the step under way, or the next one, should take by the steps so far (StepTimes).
    # None: too few of its kind were seen.
    expected_step_s: float | None = None
    # Prompt tokens of requests that have made their first token here, and how many of them were found in the
    # prefix cache.
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    # Of these, those that were in host memory.
    host_cached_prompt_tokens: int = 0
    # Evicted blocks in host memory, in bytes, beside `host_kv_bytes_used`; blocks that went there, that came
    # back to the device, and that had to go for others.
    host_cached_bytes: int = 0
    host_blocks_stored: int = 0
    host_blocks_loaded: int = 0
    host_blocks_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Exported:
    """A request at the moment its export was opened; its full blocks are pinned from then on."""

    key: RequestKey
    frontend_id: str
    epoch: int
    frames: Frames
    output_token_ids: list[int]
    phase: EnginePhase
    traceparent: str
    # Content hash of each full block whose KV exists and can be had.
    block_hashes: list[bytes]
    # Why this request can go by replay only; empty: live.
    replay_reason: str = ""
    # As in Submission.
    adapter_version: str = ""


@dataclass(frozen=True, slots=True)
class ExportedPause:
    """What is left to hand over once the request is paused; by replay, of its KV nothing."""

    new_output_token_ids: list[int]
    # Tokens whose KV exists: all but the last sampled one.
    computed_tokens: int
    # From the first block that the target lacks; the last one may be partial (empty hash).
    block_hashes: list[bytes]
    sampling_state: bytes
    token_interval_ms: float
    # The latest prediction of the tokens still to come; None: nobody predicts here.
    predicted_remaining_tokens: float | None = None
    # Seconds that the step under way took to end after this was asked for.
    waited_s: float = 0.0
    # Seconds since its first answering token; 0: there is none. For the target: the source's worker knows.
    answering_for_s: float = 0.0


class Staging(Protocol):
    """A buffer that UCX sends from and receives into."""

    @property
    def buffer(self) -> object:
        """What ucxx takes: an object with the buffer protocol or __cuda_array_interface__."""


class Engine(Protocol):
    """One engine. See the module's docstring for threads."""

    async def start(self, sink: EngineSink) -> EngineInfo:
        """Load the model and begin to step. Raises RuntimeError with what to do when it cannot."""

    async def stop(self) -> None:
        """Stop stepping and free everything."""

    # ---- the data path

    def submit(self, submission: Submission) -> None:
        """Take a request. A request that cannot run is answered with a FAILED output, never an exception."""

    def abort(self, keys: Sequence[RequestKey]) -> None:
        """Free these requests, wherever they are in their life; unknown ones are ignored."""

    def abort_client(self, client: int) -> None:
        """Free every request of a front end whose stream broke."""

    def utility(self, client: int, call_id: int, frames: Frames) -> None:
        """vLLM's utility call, verbatim; answered through EngineSink.on_utility."""

    def set_intra(
        self, name: str, parameters: Mapping[str, Value] = NO_PARAMETERS, slo: Slo | None = None
    ) -> None:
        """Order the requests by this intra-instance policy (a name of tailrace.intra.registry) from the next
        step on, for the deployment's SLOs. Raises UnknownIntraError, ParameterError."""

    def stats(self) -> EngineStats:
        """The engine as it is now; cheap enough for every report."""

    async def find_held(self, keys: Sequence[RequestKey]) -> dict[RequestKey, Held]:
        """Those of these requests that the engine has, waiting, running or paused; not those on their way in.
        Submissions that came before the call are among them, and the outputs that were made before the answer
        have been delivered. Raises EngineRefusal."""

    # ---- source of a migration. One export a request; raise EngineRefusal.

    async def export_open(self, request_id: str) -> Exported:
        """Pin the request's full blocks; it goes on decoding."""

    async def export_more(self, request_id: str, have_blocks: int) -> list[bytes]:
        """Pin and name the full blocks from number have_blocks on that exist now."""

    async def export_pause(self, request_id: str, have_blocks: int) -> ExportedPause:
        """Stop scheduling the request; its tokens so far have all been delivered to the sink before this
        returns. Refused when the request has finished meanwhile."""

    async def export_stop(self, request_id: str) -> ExportedPause:
        """As export_pause, for a replay: whether the request has KV or not."""

    async def export_resume(self, request_id: str) -> None:
        """Abort: unpin, and go on as if nothing had happened."""

    async def export_release(self, request_id: str) -> None:
        """Committed elsewhere: free the request and its blocks, without any output for it."""

    def staging(self, num_blocks: int) -> Staging:
        """A contiguous buffer of num_blocks * KvShape.block_bytes in the memory that holds the KV."""

    def staging_over(self, memory: npt.NDArray[np.uint8]) -> Staging | None:
        """The same over host memory that is given, a whole number of blocks; None: the KV is elsewhere."""

    async def read_blocks(
        self, request_id: str, first_block: int, num_blocks: int, out: Staging
    ) -> list[int]:
        """Copy pinned blocks into `out`, each block layer by layer; one 64-bit checksum a block."""

    # ---- target of a migration

    async def replay_check(self, exported: Exported, key: RequestKey) -> None:
        """Whether the request could run here, computed anew, and begin at once. Nothing is reserved for it:
        once the front end has accepted, it is submitted.

        Raises EngineRefusal for what this engine lacks (an adapter, length), NoRoom while it has no room.
        """

    async def import_open(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        """Reserve room for the request as it is now (one block beyond). Raises NoRoom when there is none or
        others wait for it; nothing then remains reserved."""

    async def import_queue(self, exported: Exported, key: RequestKey, epoch: int) -> None:
        """Reserve room as import_open does, once there is room and those that queued before have theirs.

        The caller sets the deadline, and calls import_drop when it gives up.
        """

    def import_cached(self, request_id: str) -> int:
        """How many of the exported blocks, from the first on, the prefix cache had when room was reserved.

        They are part of the reservation, need not come, and must not be written. Raises EngineRefusal.
        """

    async def import_reserve(self, request_id: str, num_blocks: int) -> None:
        """Grow the reservation to hold this many blocks of KV."""

    async def write_blocks(
        self, request_id: str, first_block: int, num_blocks: int, received: Staging, checksums: Sequence[int]
    ) -> None:
        """Check the received blocks against read_blocks' checksums and copy them into the reservation.

        Raises KvCorrupt, having written nothing, when one does not match.
        """

    async def import_prepare(self, request_id: str, pause: ExportedPause) -> None:
        """All KV is here: rebuild tokens, sampling and grammar state, ready to run. Does not run yet."""

    async def import_activate(self, request_id: str) -> None:
        """The front end has accepted the epoch: decode from the next index on."""

    async def import_drop(self, request_id: str) -> None:
        """Abort: free the reservation; unknown requests are ignored."""

    # ---- prefixes that go from one engine to another. Blocks of a loan are read with read_blocks, those of a
    # fetch written with write_blocks, under its name in place of a request's, each counted from 0.

    async def submitted(self, request_id: str) -> Frames:
        """A request that is here, as it was submitted. Raises EngineRefusal."""

    async def loan_open(self, loan_id: str, names: Sequence[bytes]) -> int:
        """Pin the blocks of the prefix cache with these names, up to the first that is not there; how many.
        Raises EngineRefusal."""

    async def loan_end(self, loan_id: str) -> None:
        """Free them; an unknown loan is ignored."""

    async def fetch_missing(self, submission: Submission) -> list[bytes]:
        """Names of the prompt's blocks that the prefix cache lacks, from the first on; sets nothing aside.
        Raises EngineRefusal as fetch_open."""

    async def fetch_open(self, fetch_id: str, submission: Submission, max_tokens: int) -> list[bytes]:
        """Set blocks aside for what the prefix cache lacks of the request's first `max_tokens`; keep it.

        Returns the names of those that are to come; nothing is set aside where that is none. Raises
        EngineRefusal for a request or an engine for which nothing can come, NoRoom.
        """

    async def fetch_keep(self, fetch_id: str, blocks: int) -> None:
        """The first `blocks` have come, and the prefix cache has them from now on. Raises EngineRefusal."""

    async def fetch_drop(self, fetch_id: str) -> None:
        """Set nothing aside any more; what the prefix cache has it may evict. An unknown fetch is ignored."""
