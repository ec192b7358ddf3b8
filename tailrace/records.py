"""What Tailrace keeps in etcd, as JSON under /tailrace/<cluster>/. Per-request state is never there.

Whatever else may be there is refused by `tailrace/store/reading.py`, by the ranges declared here.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Annotated, Final
from urllib.parse import quote

import msgspec
from msgspec import Meta

from tailrace.cache.names import Naming
from tailrace.handover import LIVE, Handover
from tailrace.model_identity import ModelIdentity
from tailrace.policy.parameters import Value
from tailrace.profiles import Profile

_NAME: Final = 512

# Beyond, a number does not fit the messages that carry it.
_MOST: Final = 2**32 - 1
_Count = Annotated[int, Meta(ge=0, le=_MOST)]
_Size = Annotated[int, Meta(ge=1, le=_MOST)]
# Beyond, it is lost in the arithmetic of floats.
_Bytes = Annotated[int, Meta(ge=0, le=2**53)]
_Number = Annotated[float, Meta(ge=-1e15, le=1e15)]
_Amount = Annotated[float, Meta(ge=0.0, le=1e15)]
# What tables show and logs name.
_Name = Annotated[str, Meta(min_length=1, max_length=_NAME)]


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One of the processes of a multi-device engine."""

    process: _Count
    # A description of its device.
    hardware: str = ""


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`instances/<id>`, leased: a worker that is a member of the fleet."""

    instance_id: _Name
    # New at each start of the worker; distinguishes a restarted worker from its predecessor.
    incarnation: _Name
    # gRPC address, host:port.
    address: str
    # Where front ends attach (tailrace/service/message_stream.py), host:port.
    stream_address: str
    metrics_address: str = ""
    engine: str
    model: str
    # Digest of everything that must be equal for two engines to exchange KV.
    model_fingerprint: str
    # What must be equal for two engines to continue each other's answers.
    model_identity: ModelIdentity
    block_tokens: _Size
    kv_blocks_total: _Count
    max_model_len: _Size
    max_num_seqs: _Size
    kv_bytes_per_token: _Bytes
    started_s: _Amount
    # The measured profile that applies to it, `profiles/<kind>`; empty: the worker has a profile of its own.
    profile_kind: str = ""
    # How it names its blocks; None: it caches no prefixes, or does not report them.
    block_naming: Naming | None = None
    # Whether it is stopping: it hands over its requests, and gets no new ones.
    draining: bool = False
    # How requests migrate between it and others of its kind.
    handover: Handover = LIVE
    # Whether it serves embedding, scoring and the like instead of generating text.
    pooling: bool = False
    # Whether requests may name a LoRA adapter.
    takes_adapters: bool = False
    # Its processes by rank: pipeline stage by stage, tensor-parallel ranks within each. Empty: it has one
    # device.
    ranks: list[RankRecord] = []
    tensor_parallel_size: _Size = 1
    pipeline_parallel_size: _Size = 1


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`services/<kind>/<id>`, leased: a scheduler, monitor, migration service, front end or edge.

    `leader/<kind>` holds the ServiceRecord of the elected one.
    """

    kind: _Name
    service_id: _Name
    incarnation: _Name
    # gRPC address, host:port.
    address: str
    metrics_address: str = ""
    # Front ends and edges only: HTTP address. Front ends only: public model name, --model and its key, and
    # the keys of the models to whose instances it is connected.
    http_address: str = ""
    model_name: str = ""
    model: str = ""
    model_key: str = ""
    connected_models: list[str] = []
    # Front ends only: the other names that users may send, of the model and of adapters in its command line,
    # and vLLM's API server (python, rust).
    names: list[_Name] = []
    api_server: str = ""
    # Front ends only: whether the API server was told how to parse tool calls (--tool-call-parser).
    parses_tools: bool = True
    # Front ends only: whether the HTTP address speaks HTTPS, and whether the API server there starts with the
    # first connection, and has not yet.
    https: bool = False
    asleep: bool = False
    # Front ends only: digest of everything besides the log that a kept answer depends on. Front ends with
    # equal digests can continue each other's answers. Empty: answers are not kept.
    answers: str = ""


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `stages`: lengths [lo, hi) in tokens and the instances that serve them."""

    lo: _Count
    hi: _Size
    instance_ids: list[str]


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`policy`: the active policy, and those of its parameters that differ from their defaults."""

    name: _Name
    parameters: dict[str, Value] = {}
    # Why `least_loaded` decides instead of it; empty: it decides.
    suspended: str = ""


def suspended(record: PolicyRecord, why: str) -> PolicyRecord:
    """Return the record of a policy that does not decide any more, and why."""
    return PolicyRecord(name=record.name, parameters=record.parameters, suspended=why)


def resumed(record: PolicyRecord) -> PolicyRecord:
    """Return the record of the same policy, not suspended."""
    return PolicyRecord(name=record.name, parameters=record.parameters)


class SloRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`slo`: the deployment's objectives, an encoded Slo; null: not set."""

    ttft_s: float | None
    tpot_s: float | None
    qoe: float | None
    pace_s: float | None
    admit: float | None


class TtftRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Arrow's TTFT curve: base + per_token * L + per_token_squared * L^2 seconds for a prompt of L alone."""

    base_s: _Number
    per_token_s: _Number
    per_token_squared_s: _Number
    r_squared: _Number
    samples: _Count


class QoeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """D_0 .. D_4 of CascadeInfer's Eq. (1), in seconds per output token; `error`: mean relative error."""

    d: tuple[_Number, _Number, _Number, _Number, _Number]
    error: _Number
    samples: _Count


class ProfileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`profiles/<kind>`: the measurements of one instance, shared by equal instances."""

    kind: _Name
    engine: str
    model: str
    model_fingerprint: str
    hardware: str
    # Maximum tokens of a step.
    step_tokens: _Size
    # Version of Tailrace.
    version: str
    # Which instance was measured, when (seconds since the epoch), and for how long (seconds).
    instance_id: str
    measured_s: _Amount
    took_s: _Amount
    # Step times, with the mean relative errors of the fits and the numbers of samples.
    profile: Profile
    prefill_error: _Number
    prefill_samples: _Count
    decode_error: _Number
    decode_samples: _Count
    ttft: TtftRecord
    # Arrow's Max Running Tokens at this step time, at most the capacity of the KV cache.
    tpot_s: _Amount
    max_running_tokens: _Count
    # None: there were too few samples.
    qoe: QoeRecord | None = None


PROFILES: Final = "profiles/"


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`adapters/<model>/<name>`, both quoted: a LoRA adapter that a user loaded at run time."""

    # Public name of the model that it adapts.
    model: _Name
    # As requests name it.
    name: _Name
    # Its folder, on front ends and workers alike.
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    # vLLM's is_3d_lora_weight.
    is_3d: bool = False

    @property
    def key(self) -> str:
        """Return its key: names may contain slashes."""
        return "/".join(("adapters", quote(self.model, safe=""), quote(self.name, safe="")))


def profile_kind(engine: str, model: str, model_fingerprint: str, hardware: str, step_tokens: int) -> str:
    """Return the name that instances of equal speed share: readable words, and a digest of everything that
    must be equal."""
    facts = msgspec.json.encode([engine, model_fingerprint, hardware, step_tokens])
    words = (_word(engine), _word(model.rstrip("/").rpartition("/")[2]), _word(hardware)[:24].rstrip("-"))
    return "-".join([*filter(None, words), blake2b(facts, digest_size=4).hexdigest()])


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
