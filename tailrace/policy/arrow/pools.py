"""Four elastic pools and the moves between them (Arrow, sections 5.2 and 5.5, Figure 5, Alg. 3 and 4).

    flip to decode:   Prefill ---------------> P->D   (Decode at once if no prefill is left)
                      D->P ------------------> Decode
    flip to prefill:  Decode ----------------> D->P   (Prefill at once if no decode is left)
                      P->D ------------------> Prefill
    work is done:     P->D -> Decode,  D->P -> Prefill

A flip only changes the pool: work in progress on the instance continues. Figure 5 shows D->P to Decode and
P->D to Prefill as direct edges; here a D->P instance with prefill work left becomes P->D instead, and a P->D
instance with decode work left becomes D->P, by the pools' definitions ("scheduled to ... but still processing
unfinished ...").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tailrace.actions import SetPool
from tailrace.cluster import ClusterView, InstanceState, InstanceView, Pool
from tailrace.policy.arrow.load import LoadModel, has_decodes_left, has_prefills_left, running_tokens

_FIELDS: Final[Mapping[Pool, str]] = {
    Pool.PREFILL: "prefill",
    Pool.DECODE: "decode",
    Pool.PREFILL_TO_DECODE: "prefill_to_decode",
    Pool.DECODE_TO_PREFILL: "decode_to_prefill",
}
_NAMES: Final = (*_FIELDS.values(), "unpooled")


@dataclass(frozen=True, slots=True)
class Pools:
    """Active instances by pool, each in id order. `unpooled` ones do both kinds of work."""

    prefill: tuple[InstanceView, ...] = ()
    decode: tuple[InstanceView, ...] = ()
    prefill_to_decode: tuple[InstanceView, ...] = ()
    decode_to_prefill: tuple[InstanceView, ...] = ()
    unpooled: tuple[InstanceView, ...] = ()

    @staticmethod
    def of(view: ClusterView, excluded: frozenset[str] = frozenset()) -> Pools:
        """Group the active instances of a view."""
        active = InstanceState.ACTIVE
        usable = [i for i in view.instances.values() if i.state is active and i.instance_id not in excluded]
        pools = (Pool.PREFILL, Pool.DECODE, Pool.PREFILL_TO_DECODE, Pool.DECODE_TO_PREFILL, None)
        # By identity: a dict of pools would hash each of them in Python.
        return Pools(*(tuple([i for i in usable if i.pool is pool]) for pool in pools))

    @property
    def able_to_prefill(self) -> int:
        """Return |I_P| + |I_D->P|, plus instances in no pool."""
        return len(self.prefill) + len(self.decode_to_prefill) + len(self.unpooled)

    @property
    def able_to_decode(self) -> int:
        """Return |I_D| + |I_P->D|, plus instances in no pool."""
        return len(self.decode) + len(self.prefill_to_decode) + len(self.unpooled)

    def members(self) -> Iterable[InstanceView]:
        """Yield all instances, pool by pool."""
        yield from self.prefill
        yield from self.decode
        yield from self.prefill_to_decode
        yield from self.decode_to_prefill
        yield from self.unpooled

    def after(self, *moves: SetPool) -> Pools:
        """Return these pools after moves, made in this order. Raise KeyError for an instance that is not
        among them."""
        if not moves:
            return self
        to = {move.instance_id: move.pool for move in moves}
        moved = [i for i in self.members() if i.instance_id in to]
        if missing := to.keys() - {i.instance_id for i in moved}:
            raise KeyError(min(missing))
        fields = {name: [i for i in getattr(self, name) if i.instance_id not in to] for name in _NAMES}
        for instance in moved:
            pool = to[instance.instance_id]
            fields["unpooled" if pool is None else _FIELDS[pool]].append(replace(instance, pool=pool))
        return Pools(**{name: tuple(sorted(among, key=_by_id)) for name, among in fields.items()})


def to_decode(instance: InstanceView) -> SetPool:
    """Return the flip of an instance to decode work (Figure 5)."""
    pool = Pool.PREFILL_TO_DECODE if has_prefills_left(instance) else Pool.DECODE
    return SetPool(instance.instance_id, pool)


def to_prefill(instance: InstanceView) -> SetPool:
    """Return the flip of an instance to prefill work (Figure 5)."""
    pool = Pool.DECODE_TO_PREFILL if has_decodes_left(instance) else Pool.PREFILL
    return SetPool(instance.instance_id, pool)


def settle(pools: Pools) -> list[SetPool]:
    """Move instances whose former work is done out of the transitional pools (Figure 5, black edges)."""
    done = [SetPool(i.instance_id, Pool.DECODE) for i in pools.prefill_to_decode if not has_prefills_left(i)]
    done += [SetPool(i.instance_id, Pool.PREFILL) for i in pools.decode_to_prefill if not has_decodes_left(i)]
    return done


def try_move_decode_to_prefill(pools: Pools) -> SetPool | None:
    """Flip a decode instance to prefill work (Alg. 3); return None if it is the last decode instance.

    P->D instances first (they are prefilling anyway), then the least running tokens.
    """
    if len(pools.decode) + len(pools.prefill_to_decode) + len(pools.unpooled) <= 1:
        return None
    chosen = _least(pools.prefill_to_decode or pools.decode, running_tokens)
    return to_prefill(chosen) if chosen is not None else None


def try_move_prefill_to_decode(pools: Pools, loads: LoadModel) -> SetPool | None:
    """Flip a prefill instance to decode work (Alg. 4); return None if it is the last prefill instance.

    D->P instances first (they are decoding anyway), then the least prefill delay.
    """
    if len(pools.prefill) + len(pools.decode_to_prefill) + len(pools.unpooled) <= 1:
        return None
    chosen = _least(pools.decode_to_prefill or pools.prefill, loads.prefill_delay_s)
    return to_decode(chosen) if chosen is not None else None


def try_move_idle_to_decode(pools: Pools) -> SetPool | None:
    """Flip an idle prefill instance to decode work (section 5.5, case 3); return None if none can be spared.

    "Idle prefill instances are added to decode computation": an instance with prompts is not idle and does
    not move, even if Alg. 4 would prefer it. A D->P instance without prompts only decodes; it goes first, as
    in Alg. 4.
    """
    if len(pools.prefill) + len(pools.decode_to_prefill) + len(pools.unpooled) <= 1:
        return None
    promptless = [i for i in pools.decode_to_prefill if not has_prefills_left(i)]
    idle = [i for i in pools.prefill if i.load == 0 and not has_prefills_left(i)]
    chosen = _least(promptless or idle, running_tokens)
    return to_decode(chosen) if chosen is not None else None


def assign(pools: Pools, prefill_share: float) -> list[SetPool]:
    """Assign instances without a pool: to prefill until `prefill_share` of all can prefill, then to decode.

    Each side gets at least one instance; a lone instance stays in no pool, since it must do both.
    """
    total = pools.able_to_prefill + pools.able_to_decode - len(pools.unpooled)
    if total < 2:
        return []
    prefill_count = min(total - 1, max(1, round(total * prefill_share)))
    prefill = len(pools.prefill) + len(pools.decode_to_prefill)
    moves: list[SetPool] = []
    for instance in pools.unpooled:
        if prefill < prefill_count:
            moves.append(to_prefill(instance))
            prefill += 1
        else:
            moves.append(to_decode(instance))
    return moves


def repair(pools: Pools, loads: LoadModel) -> SetPool | None:
    """Flip an instance if the loss of others left none that can prefill, or none that can decode."""
    if pools.able_to_prefill == 0:
        return try_move_decode_to_prefill(pools)
    if pools.able_to_decode == 0:
        return try_move_prefill_to_decode(pools, loads)
    return None


def _least(instances: Sequence[InstanceView], load: Callable[[InstanceView], float]) -> InstanceView | None:
    return min(instances, key=lambda i: (load(i), i.load, i.instance_id), default=None)


def _by_id(instance: InstanceView) -> str:
    return instance.instance_id
