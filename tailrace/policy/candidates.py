"""Select instances that may take a request, by their state, their free KV and their prefix caches.

Lengths in tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

from tailrace.actions import Migrate, Refuse
from tailrace.cluster import Arrival, ClusterView, InstanceState, InstanceView, RequestView
from tailrace.perf.steps import StepModel, held_tokens
from tailrace.policy.parameters import parameter

NO_INSTANCE = Refuse("no active instance")


def candidates(view: ClusterView, arrival: Arrival) -> list[InstanceView]:
    """Return active instances that the arrival does not exclude, in instance-id order."""
    active = InstanceState.ACTIVE
    excluded = arrival.excluded
    if not excluded:
        return [i for i in view.instances.values() if i.state is active]
    return [i for i in view.instances.values() if i.state is active and i.instance_id not in excluded]


CACHE_AWARE: Final = parameter(
    False,
    "whether the tokens of an arrival's prefix that an instance has cached are subtracted there; those in "
    "host memory count less by what it takes to load them",
    source="false: the paper, which has no prefix cache; true: ours",
)


def held_tokens_on(arrival: Arrival, instance: InstanceView, nominal: StepModel) -> int:
    """Return the cached tokens of the arrival on an instance; those in host memory count less the cost of
    loading them.

    `nominal`: step times for instances that have not been measured.
    """
    device, total, _ = arrival.held_on(instance.instance_id)
    steps = nominal if instance.measured is None else instance.measured.steps
    return held_tokens(steps, device, total)


def credit(arrival: Arrival, cache_aware: bool, nominal: StepModel) -> Callable[[InstanceView], int]:
    """Return a function from an instance to the cached tokens of the arrival there; always 0 unless
    `cache_aware`.

    The papers' policies do not consider prefix caches (`cache_aware` false).
    """
    if not cache_aware or not arrival.cached:
        return _none
    return lambda instance: held_tokens_on(arrival, instance, nominal)


def _none(instance: InstanceView) -> int:
    return 0


QUEUED_WEIGHT: Final = parameter(
    1.0,
    "weight of placed prompts without KV in an instance's KV footprint (m_i)",
    source="ours; 0 follows PASCAL literally",
    minimum=0.0,
)


def footprint_tokens(instance: InstanceView, queued_weight: float) -> float:
    """Return PASCAL's m_i, "total memory occupied by KV cache (GPU + CPU)", plus the queued prompts.

    `queued_weight`: weight of a prompt token that was sent to the instance but is not prefilled yet.
    """
    return instance.kv_used_tokens + instance.host_kv_tokens + queued_weight * instance.prefill_backlog_tokens


def kv_needed_tokens(context_tokens: int, block_tokens: int) -> int:
    """Return the KV tokens that a request needs on a new instance: whole blocks, and one to grow into."""
    block_tokens = max(1, block_tokens)
    return (-(-context_tokens // block_tokens) + 1) * block_tokens


def fits_model(target: InstanceView, context_tokens: int) -> bool:
    """Return whether the context is below the target's maximum model length (0: unknown, so any fits)."""
    return target.max_model_len <= 0 or context_tokens < target.max_model_len


def fits_device(target: InstanceView, context_tokens: int, growth_tokens: int = 0) -> bool:
    """Return whether the target has device memory for the request and `growth_tokens` more."""
    needed = kv_needed_tokens(context_tokens + growth_tokens, target.block_tokens)
    return needed <= target.kv_free_tokens and fits_model(target, context_tokens)


def fits_host(target: InstanceView, context_tokens: int) -> bool:
    """Return whether the target's host memory has room for the request until it gets the device."""
    needed = kv_needed_tokens(context_tokens, target.block_tokens)
    return (
        needed <= target.host_kv_capacity_tokens - target.host_kv_tokens
        and needed <= target.kv_capacity_tokens
        and fits_model(target, context_tokens)
    )


def with_request(target: InstanceView, request: RequestView) -> InstanceView:
    """Return the target with the request added, for further decisions on the same view."""
    return dataclasses.replace(
        target,
        kv_used_tokens=target.kv_used_tokens + kv_needed_tokens(request.context_tokens, target.block_tokens),
        context_tokens=target.context_tokens + request.context_tokens,
        migrations_in=target.migrations_in + 1,
    )


class Ledger:
    """Track the room left on each instance while a policy decides on several migrations at once.

    Each of them alone may fit where all of them together do not.
    """

    def __init__(
        self, instances: Mapping[str, InstanceView], transfers_in: int | None, transfers_out: int | None
    ) -> None:
        """`transfers_in`, `transfers_out`: maximum number of open migrations per instance and direction;
        None: no limit."""
        self._instances = instances
        self._max_transfers_in = transfers_in
        self._max_transfers_out = transfers_out
        self._tokens: dict[str, int] = {}
        self._in: dict[str, int] = {}
        self._out: dict[str, int] = {}
        self._moved: set[str] = set()

    def free_tokens(self, instance: InstanceView) -> int:
        """Return the free KV tokens on an instance after all reservations."""
        return instance.kv_free_tokens - self._tokens.get(instance.instance_id, 0)

    def reserved_tokens(self, instance: InstanceView) -> int:
        """Return the KV tokens reserved on an instance."""
        return self._tokens.get(instance.instance_id, 0)

    def transfers_in(self, instance: InstanceView) -> int:
        """Return the number of open and reserved migrations to an instance."""
        return instance.migrations_in + self._in.get(instance.instance_id, 0)

    def may_send(self, source: InstanceView, request: RequestView) -> bool:
        """Return whether the request is not moving, and its source may open another transfer."""
        if request.migrating or request.request_id in self._moved:
            return False
        return self._max_transfers_out is None or (
            source.migrations_out + self._out.get(source.instance_id, 0) < self._max_transfers_out
        )

    def accepts_transfers(self, target: InstanceView) -> bool:
        """Return whether the target is active and may open another transfer; free KV is not considered."""
        if target.state is not InstanceState.ACTIVE:
            return False
        return self._max_transfers_in is None or self.transfers_in(target) < self._max_transfers_in

    def may_queue(self, target: InstanceView, request: RequestView) -> bool:
        """Return whether the target accepts transfers and could hold the request when empty."""
        if target.instance_id == request.instance_id or not self.accepts_transfers(target):
            return False
        if not fits_model(target, request.context_tokens):
            return False
        return target.kv_capacity_tokens >= needed_tokens(request, target)

    def may_receive(self, target: InstanceView, request: RequestView) -> bool:
        """Return whether the target may queue the request and has free KV for it now: its whole context and
        one block to grow into."""
        return self.may_queue(target, request) and self.free_tokens(target) >= needed_tokens(request, target)

    def reserve(self, request: RequestView, target: InstanceView, reason: str) -> Migrate:
        """Reserve room for a migration, and return it."""
        name, source = target.instance_id, request.instance_id
        self._tokens[name] = self._tokens.get(name, 0) + needed_tokens(request, target)
        self._in[name] = self._in.get(name, 0) + 1
        self._out[source] = self._out.get(source, 0) + 1
        self._moved.add(request.request_id)
        return Migrate(request.request_id, source, name, reason)


def needed_tokens(request: RequestView, target: InstanceView) -> int:
    """Return the KV tokens that a request takes on a target."""
    return kv_needed_tokens(max(request.kv_tokens, request.context_tokens), target.block_tokens)
