"""Draw the kinds, targets and durations of faults: a pure function of the seed."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final


class Kind(enum.StrEnum):
    """Kind of fault."""

    KILL = "kill -9"
    STOP = "SIGSTOP"
    RESTART = "restart"
    PROXY_KILLED = "kill -9 of its proxy"
    DEAF = "hears nobody"
    MUTE = "nobody hears it"
    ONE_WAY = "one does not hear another"
    CUT = "cut off"
    LOSS = "5% loss"
    SLOW_LINK = "slow link"
    FULL_DISK = "full disk"
    ETCD_STOPPED = "etcd: stopped"
    ETCD_ISOLATED = "etcd: isolated"
    ETCD_CUT = "etcd: cut off"
    ETCD_FULL_DISK = "etcd: full disk"
    ETCD_WIPED = "etcd: wiped"
    ETCD_LOST = "etcd: lost to it"
    CORRUPT_KV = "corrupt KV"
    POISON = "poison request"
    HUGE_BODY = "huge body"
    SLOW_READER = "slow reader"
    ROTATE = "certificates rotated"
    POLICY = "policy switched"
    WRONG_POLICY = "policy with a mistake"
    UNREADABLE = "unreadable records"
    LONG_IDS = "long request IDs"
    ROLLOUT = "rollout"
    UNDONE = "rollout undone"


class Tier(enum.StrEnum):
    """Kind of process that a fault hits."""

    WORKER = "worker"
    FRONTEND = "frontend"
    SCHEDULER = "scheduler"
    MONITOR = "monitor"
    MIGRATION = "migration"
    ETCD = "etcd"
    EDGE = "edge"


class Version(enum.StrEnum):
    """Version of the model."""

    FIRST = "first"
    # Same configuration and tokenizer, other weights.
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Rule:
    """Relative frequency of a kind, and its duration in seconds (log-uniform)."""

    weight: float
    tiers: Sequence[Tier] = ()
    shortest_s: float = 0.0
    longest_s: float = 0.0


# Weighted towards the data path.
_SERVICES: Final = (
    *(Tier.WORKER, Tier.WORKER, Tier.WORKER, Tier.FRONTEND, Tier.FRONTEND),
    *(Tier.SCHEDULER, Tier.MONITOR, Tier.MIGRATION),
)
_ETCD: Final = (Tier.ETCD,)

RULES: Final[Mapping[Kind, Rule]] = {
    Kind.KILL: Rule(5, _SERVICES),
    Kind.STOP: Rule(4, _SERVICES, 1.0, 60.0),
    Kind.RESTART: Rule(3, _SERVICES),
    Kind.DEAF: Rule(1.5, _SERVICES, 1.0, 15.0),
    Kind.MUTE: Rule(1.5, _SERVICES, 1.0, 15.0),
    Kind.ONE_WAY: Rule(2, _SERVICES, 1.0, 15.0),
    Kind.CUT: Rule(2, _SERVICES, 1.0, 15.0),
    Kind.LOSS: Rule(2, _SERVICES, 3.0, 10.0),
    Kind.SLOW_LINK: Rule(1.5, _SERVICES, 3.0, 10.0),
    Kind.FULL_DISK: Rule(1, (Tier.MIGRATION, Tier.SCHEDULER), 2.0, 8.0),
    Kind.ETCD_STOPPED: Rule(1, _ETCD, 3.0, 15.0),
    Kind.ETCD_ISOLATED: Rule(1, _ETCD, 3.0, 15.0),
    Kind.ETCD_CUT: Rule(1, _ETCD, 3.0, 15.0),
    Kind.ETCD_FULL_DISK: Rule(0.5, _ETCD, 3.0, 10.0),
    Kind.ETCD_WIPED: Rule(0.5, _ETCD),
    Kind.CORRUPT_KV: Rule(2, (Tier.WORKER,), 2.0, 4.0),
    Kind.POISON: Rule(1.5, (Tier.FRONTEND,)),
    Kind.HUGE_BODY: Rule(1, (Tier.FRONTEND,)),
    Kind.SLOW_READER: Rule(1.5, (Tier.FRONTEND,), 2.0, 6.0),
    Kind.ROTATE: Rule(1),
    Kind.POLICY: Rule(2),
    Kind.WRONG_POLICY: Rule(1.5, (), 1.0, 8.0),
    Kind.UNREADABLE: Rule(1, (), 2.0, 10.0),
    Kind.LONG_IDS: Rule(1, (Tier.FRONTEND,)),
    Kind.ROLLOUT: Rule(1.5),
    Kind.UNDONE: Rule(1, (), 0.5, 10.0),
    # Of edges only: see EDGE_WEIGHTS.
    Kind.PROXY_KILLED: Rule(0, (Tier.EDGE,)),
    Kind.ETCD_LOST: Rule(0, (Tier.EDGE,), 3.0, 20.0),
}

EDGE_WEIGHTS: Final[Mapping[Kind, float]] = {
    Kind.KILL: 2,
    Kind.PROXY_KILLED: 2,
    Kind.RESTART: 2,
    Kind.STOP: 1,
    Kind.CUT: 1,
    Kind.LOSS: 1,
    Kind.ETCD_LOST: 2,
}
"""Relative frequency of the kinds that hit an edge."""
# Drawn apart, so that a seed's other faults are those that it had before there was an edge.
_EDGE_SHARE: Final = 0.15

ROLLOUTS: Final = frozenset({Kind.ROLLOUT, Kind.UNDONE})
"""At most one of these at a time."""

SIMULATED_ONLY: Final = ROLLOUTS | {Kind.POISON}
"""Kinds that real engines do not support, or for which this machine has too few of them."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `other`: the process whose packets are dropped, or the policy."""

    number: int
    kind: Kind
    target: str = ""
    seconds: float = 0.0
    other: str = ""

    def __str__(self) -> str:
        words = [self.kind.value]
        if self.target:
            words.append(self.target)
        if self.other:
            words.append(f"({self.other})")
        if self.seconds:
            words.append(f"for {self.seconds:.1f} s")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Targets:
    """What faults can hit: process names by tier, policies, and policies with a mistake."""

    names: Mapping[Tier, Sequence[str]]
    policies: Sequence[str]
    wrong_policies: Sequence[str]


def draw(seed: int, count: int, targets: Targets, kinds: Collection[Kind]) -> Iterator[Fault]:
    """Yield the first `count` faults of this seed; a larger count begins with the same ones."""
    drawn = [kind for kind in RULES if kind in kinds]
    weights = [RULES[kind].weight for kind in drawn]
    of_edge = [kind for kind in EDGE_WEIGHTS if kind in kinds] if targets.names.get(Tier.EDGE) else []
    for number in range(count):
        rng = random.Random(f"{seed}/{number}/edge")
        if of_edge and (not any(weights) or rng.random() < _EDGE_SHARE):
            (kind,) = rng.choices(of_edge, [EDGE_WEIGHTS[each] for each in of_edge])
            target = rng.choice(targets.names[Tier.EDGE])
            yield Fault(number, kind, target, _seconds(rng, RULES[kind]))
        else:
            yield _draw_one(random.Random(f"{seed}/{number}"), number, targets, drawn, weights)


def _draw_one(
    rng: random.Random, number: int, targets: Targets, kinds: Sequence[Kind], weights: Sequence[float]
) -> Fault:
    (kind,) = rng.choices(kinds, weights)
    rule = RULES[kind]
    seconds = _seconds(rng, rule)
    target = rng.choice(targets.names[rng.choice(rule.tiers)]) if rule.tiers else ""
    other = ""
    if kind is Kind.POLICY:
        other = rng.choice(targets.policies)
    elif kind is Kind.WRONG_POLICY:
        other = rng.choice(targets.wrong_policies)
    elif kind is Kind.ONE_WAY:
        others = [name for tier in dict.fromkeys(_SERVICES) for name in targets.names[tier] if name != target]
        other = rng.choice(others)
    return Fault(number, kind, target, seconds, other)


def _seconds(rng: random.Random, rule: Rule) -> float:
    if not rule.longest_s:
        return 0.0
    return round(math.exp(rng.uniform(math.log(rule.shortest_s), math.log(rule.longest_s))), 1)
