"""Where a request goes: the scheduler says, and while none answers the front end does as well as it can."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import grpc
import msgspec

from frontend_svc.links import Outbox
from frontend_svc.streams import Needs, Stream, StreamTable
from tailrace.adapter_versions import engine_name
from tailrace.cache.names import Naming, block_names
from tailrace.cluster import Pool
from tailrace.model_identity import ModelIdentity, covers, fingerprint, is_model
from tailrace.records import InstanceRecord, ServiceRecord
from tailrace.rollout.record import RolloutRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, preferred
from tailrace.service.reachability import Reachability
from tailrace.service.tasks import task_error
from tailrace.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from tailrace.wire.cache_keys import read_cache_keys

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a scheduler is told of a request's prefix: names of its blocks, never its tokens.

    `names` is empty where no instance names its blocks; each name stands for `block_tokens` tokens.
    """

    names: Sequence[int] = ()
    block_tokens: int = 0
    session_id: str = ""


def common_naming(records: Iterable[InstanceRecord]) -> Naming | None:
    """How most of these instances name their blocks; None: none of them tells."""
    namings = Counter(record.block_naming for record in records if record.block_naming is not None)
    return max(namings, key=lambda naming: (namings[naming], repr(naming)), default=None)


def prefix_of(stream: Stream, naming: Naming | None) -> Prefix:
    """Of the prompt and what has been accepted since."""
    read = read_cache_keys(stream.frames)
    if read is None:
        return Prefix()
    if naming is None:
        return Prefix(session_id=read.session_id)
    try:
        tokens = read.tokens()
    except msgspec.DecodeError:
        return Prefix(session_id=read.session_id)
    if stream.accepted:
        tokens = [*tokens, *stream.token_ids]
    keys = read.keys
    if keys.adapter is not None:
        name, path = keys.adapter
        keys = keys._replace(adapter=(engine_name(name, path, stream.adapter_version), path))
    return Prefix(block_names(tokens, naming, keys), naming.block_tokens, read.session_id)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a front end. `name` is what the front end was started with: a folder, or a name;
    `public_name` is what users call it."""

    name: str
    identity: ModelIdentity
    public_name: str = ""

    @property
    def key(self) -> str:
        """Stands for every instance that may answer here, whatever precision it was told to use."""
        return self.identity.key

    def is_run_by(self, record: InstanceRecord) -> bool:
        """Whether an instance may answer here.

        The same configuration, tokenizer and weights. Where the front end has no weights to look at, an
        instance must have been started with the same name of a model instead.
        """
        if not is_model(record.model_identity, self.key):
            return False
        return bool(self.identity.weights) or record.model_identity is None or record.model == self.name


class Members(Protocol):
    """The part of tailrace.store.membership.Membership that is used here."""

    @property
    def instances(self) -> Mapping[str, InstanceRecord]: ...
    @property
    def services(self) -> Mapping[tuple[str, str], ServiceRecord]: ...
    @property
    def leaders(self) -> Mapping[str, ServiceRecord]: ...
    @property
    def pools(self) -> Mapping[str, Pool]: ...
    @property
    def draining(self) -> frozenset[str]: ...
    @property
    def leaving(self) -> frozenset[str]: ...
    @property
    def suspects(self) -> frozenset[str]: ...
    @property
    def rollouts(self) -> Mapping[str, RolloutRecord]: ...
    @property
    def unread_rollouts(self) -> frozenset[str]: ...
    def add_listener(self, callback: Callable[[], None]) -> None: ...


class Fleet:
    """Membership as last heard, and what instances say over their links, which etcd may not know yet.

    Instances that run another model than the front end serves are not in it. Where a rollout says which model
    takes the new requests of the name that users call it, those of its two models are.
    """

    def __init__(self, members: Members, served: ServedModel | None = None) -> None:
        """`served` None: whatever model the instances run."""
        self._members = members
        self._served = served
        self._instances: dict[str, InstanceRecord] = {}
        self._model = ""
        self._rollout: RolloutRecord | None = None
        # What a scheduler told, which this front end had not heard from etcd.
        self._told_rollout: RolloutRecord | None = None
        self._listeners: list[Callable[[], None]] = []
        # See `unable`.
        self._pooling = self._generating = self._without_adapters = frozenset[str]()
        self._naming: Naming | None = None
        # Instances of other models, by the incarnation that was logged.
        self._others: dict[str, str] = {}
        # Keys of the models of those that are attached, which may have left the fleet meanwhile.
        self._told: dict[str, str] = {}
        # Instances that said that they drain, by the incarnation that did.
        self._stopping: dict[str, str] = {}
        self.refresh()

    @property
    def instances(self) -> Mapping[str, InstanceRecord]:
        """By instance id, suspects included: those that run the model."""
        return MappingProxyType(self._instances)

    @property
    def model(self) -> str:
        """Key of the model that may answer a new request: exact where all instances are of one, else
        short."""
        return self._model

    @property
    def naming(self) -> Naming | None:
        """How the instances name their KV blocks; None: none of them tells."""
        return self._naming

    def takes_new(self, instance_ids: Iterable[str]) -> list[str]:
        """Those of these instances whose model takes new requests."""
        if self.unreadable:
            return []
        return [instance_id for instance_id in instance_ids if self.is_model(instance_id, self._model)]

    def models_of(self, instance_ids: Iterable[str]) -> frozenset[str]:
        """Keys of the models that these instances run, as far as they tell."""
        return frozenset(filter(None, map(self.model_of, instance_ids)))

    def model_of(self, instance_id: str) -> str:
        """Key of the model that an instance runs; empty: it is not known."""
        told = self._told.get(instance_id)
        if told:
            return told
        record = self._instances.get(instance_id)
        return record.model_identity.key if record is not None and record.model_identity is not None else ""

    def is_model(self, instance_id: str, model: str) -> bool:
        """Whether an instance that is attached may run the model of this key. One that does not tell may run
        any, but while two models of one name are about."""
        key = self.model_of(instance_id)
        return covers(model, key) if key else self._rollout is None

    def unable(self, needs: Needs) -> frozenset[str]:
        """Instances that run the model and yet not such a request."""
        others = self._pooling if needs.generates else self._generating
        return others | self._without_adapters if needs.adapter else others

    @property
    def services(self) -> Mapping[tuple[str, str], ServiceRecord]:
        """See Members."""
        return self._members.services

    @property
    def leaders(self) -> Mapping[str, ServiceRecord]:
        """See Members."""
        return self._members.leaders

    @property
    def pools(self) -> Mapping[str, Pool]:
        """See Members."""
        return self._members.pools

    @property
    def draining(self) -> frozenset[str]:
        """Instances that get nothing new."""
        draining = self._members.draining
        return draining.union(self._stopping) if self._stopping else draining

    @property
    def leaving(self) -> frozenset[str]:
        """Of these, instances that nothing but a rollout drains."""
        return self._members.leaving.difference(self._stopping)

    @property
    def suspects(self) -> frozenset[str]:
        """See Members."""
        return self._members.suspects

    @property
    def rollouts(self) -> Mapping[str, RolloutRecord]:
        """See Members."""
        return self._members.rollouts

    @property
    def unread_rollouts(self) -> frozenset[str]:
        """See Members."""
        return self._members.unread_rollouts

    def add_listener(self, callback: Callable[[], None]) -> None:
        """See Members; called, too, when a scheduler tells of a rollout. What instances say themselves comes
        by their links alone."""
        self._members.add_listener(callback)
        self._listeners.append(callback)

    @property
    def public_name(self) -> str:
        """What users call the model; empty: any model is served."""
        return "" if self._served is None else self._served.public_name

    @property
    def unreadable(self) -> str:
        """Why it is not known which model takes new requests; empty: it is."""
        if self._newest() is not None or self.public_name not in self._members.unread_rollouts:
            return ""
        return f"the rollout of {self.public_name} cannot be read by this version of the front end"

    def told(self, rollout: RolloutRecord) -> bool:
        """A scheduler tells of the rollout of this name. True: this front end had not heard of it, and new
        requests go by it from now on.

        Not followed while no instance that is known here runs the model that takes new requests: a front end
        that is cut off from etcd cannot learn of others, and the old ones may still answer.
        """
        served, known = self._served, self._newest()
        if served is None or not rollout.steers(served.key):
            return False
        if rollout.model != served.public_name or (known is not None and not rollout.newer_than(known)):
            return False
        if not any(is_model(record.model_identity, rollout.in_force) for record in self._tellers()):
            return False
        log.warning("a scheduler tells of a rollout that etcd's watch has not: is etcd reachable from here?")
        self._told_rollout = rollout
        self.refresh()
        for callback in self._listeners:
            callback()
        return True

    def _tellers(self) -> list[InstanceRecord]:
        """Members that tell which model they run."""
        return [record for record in self._members.instances.values() if record.model_identity is not None]

    def _newest(self) -> RolloutRecord | None:
        """The rollout of this name as etcd or a scheduler told it, whichever is later."""
        heard, told = self._members.rollouts.get(self.public_name), self._told_rollout
        if heard is None or told is None:
            return heard or told
        return told if told.newer_than(heard) else heard

    def attached(self, instance_id: str, hello: worker_pb2.WorkerHello) -> None:
        """An instance greets: which model it runs and whether it drains is known anew."""
        self._told[instance_id] = hello.model
        self._stopping.pop(instance_id, None)
        if hello.draining:
            self.stopping(instance_id)

    def lost(self, instance_id: str) -> None:
        """An instance answers no more."""
        self._told.pop(instance_id, None)

    def stopping(self, instance_id: str) -> None:
        """An instance says that it drains."""
        record = self.instances.get(instance_id)
        if record is not None:
            self._stopping[instance_id] = record.incarnation

    def refresh(self) -> None:
        """Membership has changed: take over who runs the model. What instances said that are gone, or were
        started again, counts no more."""
        self._rollout = self._governing()
        instances = self._instances = self._choose()
        self._pooling = frozenset(name for name, record in instances.items() if record.pooling)
        self._generating = frozenset(instances) - self._pooling
        self._without_adapters = frozenset(n for n, record in instances.items() if not record.takes_adapters)
        self._naming = common_naming(instances.values())
        if self._served is not None:
            takes = self._served.key if self._rollout is None else self._rollout.in_force
            keys = {key for key in self.models_of(instances) if covers(takes, key)}
            self._model = keys.pop() if len(keys) == 1 else takes
        self._stopping = {
            name: incarnation
            for name, incarnation in self._stopping.items()
            if name in instances and instances[name].incarnation == incarnation
        }

    def _governing(self) -> RolloutRecord | None:
        """The rollout that says where new requests go; None: they go to the front end's own model."""
        served = self._served
        rollout = self._newest()
        if served is None or rollout is None or not rollout.steers(served.key):
            return None
        before = self._rollout
        if before is None or before.in_force != rollout.in_force:
            log.info("new requests go to model %s (%s)", fingerprint(rollout.in_force), rollout.state.value)
        return rollout

    def _runs(self, served: ServedModel, record: InstanceRecord) -> bool:
        if self._rollout is None:
            return served.is_run_by(record)
        identity = record.model_identity
        return identity is not None and self._rollout.has_model(identity.key)

    def _choose(self) -> dict[str, InstanceRecord]:
        """Members that run the model. Others are logged, once each."""
        known = self._members.instances
        served = self._served
        if served is None:
            return dict(known)
        chosen = {name: record for name, record in known.items() if self._runs(served, record)}
        for name in known.keys() - chosen.keys():
            if self._others.get(name) != known[name].incarnation:
                log.warning(
                    "%s runs another model (%s) than this front end serves (%s): it is not used here",
                    name,
                    known[name].model,
                    served.name,
                )
        self._others = {name: known[name].incarnation for name in known.keys() - chosen.keys()}
        return chosen


def usable(members: Members, attached: list[str]) -> list[str]:
    """Instances that may get new work as far as this front end can tell.

    Suspects only when there is nobody else: etcd has not heard of them, but they do answer here.
    """
    willing = [i for i in attached if i not in members.draining]
    return [i for i in willing if i not in members.suspects] or willing


# Arrow's pools: these take no prefills (P->D finishes the ones it has).
_NO_PREFILL = frozenset({Pool.DECODE, Pool.PREFILL_TO_DECODE})


def may_prefill(members: Members, candidates: list[str]) -> list[str]:
    """Those in a pool that prefills; all of them when there is none, which is better than no answer."""
    prefill = [i for i in candidates if members.pools.get(i) not in _NO_PREFILL]
    return prefill or candidates


_DEADLINE_S: Final = 1.0
# Requests of one call. A scheduler decides on all of them before it does anything else, some 50 ms for so
# many; fewer would have a burst of a thousand wait for many calls in a row, each slow while all are busy.
_TOGETHER: Final = 512

_Answer = asyncio.Future[scheduler_pb2.PlaceReply | None]


class PlaceCalls:
    """Asks schedulers where requests go: one call at a time, and what comes meanwhile together in the next.

    A call costs both ends a millisecond, whatever it asks: in a burst, most of what placing takes.
    """

    def __init__(
        self, members: Members, channels: Channels, reachability: Reachability | None = None
    ) -> None:
        """`reachability`: its own when not given; closed with it."""
        self._members = members
        self._channels = channels
        # A scheduler that did not answer is probed in the background: its deadline is paid by one call only.
        self._reachability = (
            reachability if reachability is not None else Reachability(channels, Role.SCHEDULER)
        )
        self._waiting: list[tuple[scheduler_pb2.PlaceRequest, _Answer]] = []
        self._asking: asyncio.Task[None] | None = None

    async def ask(self, request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceReply | None:
        """The reply of the first scheduler that answers, the leader before the others; None: none does."""
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._asking is None:
            self._asking = asyncio.create_task(self._run(), name="place calls")
            self._asking.add_done_callback(_look)
        return await answer

    async def close(self) -> None:
        """Ask no more; who still waits hears that nobody answered."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await self._reachability.close()

    async def _run(self) -> None:
        asked: list[tuple[scheduler_pb2.PlaceRequest, _Answer]] = []
        try:
            while self._waiting:
                asked, self._waiting = self._waiting[:_TOGETHER], self._waiting[_TOGETHER:]
                replies = await self._call([request for request, _ in asked])
                for (_, answer), reply in zip(asked, replies, strict=True):
                    _settle(answer, reply)
        finally:
            # In the same turn as the last look at who waits: whoever comes after begins anew.
            self._asking = None
            for _, answer in (*asked, *self._waiting):
                _settle(answer, None)
            self._waiting.clear()

    async def _call(
        self, requests: list[scheduler_pb2.PlaceRequest]
    ) -> list[scheduler_pb2.PlaceReply] | list[None]:
        for address in self._schedulers():
            stub = scheduler_pb2_grpc.SchedulerStub(self._channels.get(address, Role.SCHEDULER))
            try:
                reply = await stub.PlaceMany(
                    scheduler_pb2.PlaceManyRequest(requests=requests), timeout=_DEADLINE_S
                )
            except grpc.aio.AioRpcError as error:
                log.warning("scheduler at %s: %s", address, error.code().name)
            else:
                if len(reply.replies) == len(requests):
                    self._reachability.succeeded(address)
                    return list(reply.replies)
                log.error("scheduler at %s: %d replies to %d", address, len(reply.replies), len(requests))
            self._reachability.failed(address)
        return [None] * len(requests)

    def _schedulers(self) -> list[str]:
        """Addresses worth asking now."""
        addresses = [record.address for record in preferred(self._members, "scheduler")]
        self._reachability.keep_only(addresses)
        return [address for address in addresses if self._reachability.usable(address)]


def _settle(answer: _Answer, reply: scheduler_pb2.PlaceReply | None) -> None:
    """Unless it is settled, or who asked has gone."""
    if not answer.done():
        answer.set_result(reply)


def _look(task: asyncio.Task[None]) -> None:
    if (error := task_error(task)) is not None:
        log.error("asking for placements failed", exc_info=error)


# The scheduler may name an instance that has just been lost; it is asked again so often.
_ASKS: Final = 3


@dataclass(frozen=True, slots=True)
class Placed:
    """The answer. `by`: the scheduler's policy, or "fallback".

    `pull`: whose KV of the request's first tokens the instance is to fetch; None: from no instance.
    """

    instance_id: str
    by: str
    pull: worker_pb2.Pull | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing can take the request now; `final`: and it is not to wait until something can."""

    reason: str
    final: bool = False


class Placement:
    """Asks a scheduler; falls back on the attached instance that carries fewest of our streams.

    A stream that has tokens goes on with the model that made them, or not at all.
    """

    def __init__(
        self, frontend_id: str, fleet: Fleet, outbox: Outbox, table: StreamTable, channels: Channels
    ) -> None:
        self._frontend_id = frontend_id
        self._fleet = fleet
        self._outbox = outbox
        self._table = table
        self._calls = PlaceCalls(fleet, channels)

    async def close(self) -> None:
        """Ask nobody any more."""
        await self._calls.close()

    def model_of(self, instance_id: str) -> str:
        """Key of the model that an instance runs; empty: it is not known."""
        return self._fleet.model_of(instance_id)

    def may_run(self, instance_id: str, model: str) -> bool:
        """Whether an instance may run the model of this key."""
        return self._fleet.is_model(instance_id, model)

    async def choose(self, stream: Stream, avoid: frozenset[str]) -> Placed | Refused:
        """An instance for the stream, attached at this moment. Takes at most a few seconds."""
        if not stream.accepted and self._fleet.unreadable:
            return Refused(self._fleet.unreadable)
        unable, excluded = self._excluded(stream, avoid)
        prefix = prefix_of(stream, self._fleet.naming)
        for _ in range(_ASKS):
            reply = await self._ask(stream, excluded, prefix)
            if reply is None:
                return self._fallback(stream, avoid | unable)
            if self._follows(reply):
                # Instances of the model that takes it are only now connected to: the stream waits for one.
                unable, excluded = self._excluded(stream, avoid)
                continue
            if not reply.instance_id:
                return Refused(reply.refusal or "the scheduler named no instance", reply.final)
            if self._may_take(reply.instance_id, stream):
                return Placed(reply.instance_id, reply.policy, _pull(reply))
            excluded.add(reply.instance_id)
        return self._fallback(stream, avoid | unable)

    def last_resort(self, stream: Stream, avoid: frozenset[str]) -> Placed | None:
        """For a stream that has tokens where `choose` finds nothing: an instance of its model from which a
        rollout keeps new requests away. They are new no more."""
        if not stream.accepted:
            return None
        model, never = self._model(stream), avoid | self._fleet.unable(stream.needs)
        leaving = self._fleet.leaving.intersection(self._outbox.attached()) - never
        candidates = [i for i in leaving if self._fleet.is_model(i, model)]
        return self._least_loaded(candidates) if candidates else None

    def _excluded(self, stream: Stream, avoid: frozenset[str]) -> tuple[frozenset[str], set[str]]:
        """Instances that are not able to run the request, and all that it must not go to: the scheduler may
        not have heard yet which of them drain."""
        unable = self._fleet.unable(stream.needs)
        return unable, {*avoid, *self._fleet.draining, *unable}

    async def _ask(
        self, stream: Stream, excluded: set[str], prefix: Prefix
    ) -> scheduler_pb2.PlaceReply | None:
        """What a scheduler says; None: none does."""
        request = scheduler_pb2.PlaceRequest(
            request_id=stream.request_id,
            frontend_id=self._frontend_id,
            prompt_tokens=stream.prompt_tokens,
            output_tokens=stream.accepted,
            max_tokens=stream.max_tokens,
            excluded_instance_ids=sorted(excluded),
            traceparent=stream.traceparent,
            model=self._model(stream),
            block_names=prefix.names,
            block_tokens=prefix.block_tokens,
            session_id=prefix.session_id,
            admitted=stream.epoch > 0 or stream.accepted > 0,
            served_name="" if stream.accepted else self._fleet.public_name,
        )
        return await self._calls.ask(request)

    def _follows(self, reply: scheduler_pb2.PlaceReply) -> bool:
        """Whether the reply tells of a rollout that had not been heard of, by which to ask again."""
        if not reply.rollout:
            return False
        try:
            rollout = msgspec.json.decode(reply.rollout, type=RolloutRecord)
        except msgspec.MsgspecError as error:
            log.warning("a scheduler's rollout cannot be read (another version?): %s", error)
            return False
        return self._fleet.told(rollout)

    def _model(self, stream: Stream) -> str:
        """Key of the model that may answer."""
        return stream.model if stream.accepted and stream.model else self._fleet.model

    def _may_take(self, instance_id: str, stream: Stream) -> bool:
        attached = instance_id in self._outbox.attached()
        return attached and self._fleet.is_model(instance_id, self._model(stream))

    def _fallback(self, stream: Stream, avoid: frozenset[str]) -> Placed | Refused:
        model = self._model(stream)
        of_model = [i for i in self._outbox.attached() if self._fleet.is_model(i, model)]
        candidates = [i for i in usable(self._fleet, of_model) if i not in avoid]
        if not candidates:
            return Refused("no instance of its model answers" if stream.accepted else "no instance answers")
        return self._least_loaded(candidates)

    def _least_loaded(self, candidates: list[str]) -> Placed:
        count = self._table.count_owned
        best = min(may_prefill(self._fleet, candidates), key=lambda i: (count(i), i))
        return Placed(best, "fallback")


def _pull(reply: scheduler_pb2.PlaceReply) -> worker_pb2.Pull | None:
    if not reply.pull_address:
        return None
    return worker_pb2.Pull(
        instance_id=reply.pull_from_instance_id, address=reply.pull_address, tokens=reply.pull_tokens
    )
