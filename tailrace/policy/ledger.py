"""Room and transfers that one decision has already given away, so that its parts add up."""

from __future__ import annotations

from collections.abc import Mapping

from tailrace.actions import Migrate
from tailrace.cluster import InstanceState, InstanceView, RequestView
from tailrace.policy.room import fits_model, kv_needed_tokens


class Ledger:
    """Lives for one decision: what the view says, less what has been booked since.

    A policy decides on several migrations at once; each alone may fit where all of them do not.
    """

    def __init__(
        self, instances: Mapping[str, InstanceView], transfers_in: int | None, transfers_out: int | None
    ) -> None:
        """`transfers_in`, `transfers_out`: most open migrations an instance and direction; None: no limit."""
        self._instances = instances
        self._most_in = transfers_in
        self._most_out = transfers_out
        self._tokens: dict[str, int] = {}
        self._in: dict[str, int] = {}
        self._out: dict[str, int] = {}
        self._moved: set[str] = set()

    def free_tokens(self, instance: InstanceView) -> int:
        """KV tokens left on an instance."""
        return instance.kv_free_tokens - self._tokens.get(instance.instance_id, 0)

    def booked_tokens(self, instance: InstanceView) -> int:
        """KV tokens that bookings will bring to an instance."""
        return self._tokens.get(instance.instance_id, 0)

    def transfers_in(self, instance: InstanceView) -> int:
        """Open and booked migrations to an instance."""
        return instance.migrations_in + self._in.get(instance.instance_id, 0)

    def may_send(self, source: InstanceView, request: RequestView) -> bool:
        """The request is not on the move, and its source may open another transfer."""
        if request.migrating or request.request_id in self._moved:
            return False
        return self._most_out is None or (
            source.migrations_out + self._out.get(source.instance_id, 0) < self._most_out
        )

    def takes_transfers(self, target: InstanceView) -> bool:
        """The target gets new work and may open another transfer, whatever room it has."""
        if target.state is not InstanceState.ACTIVE:
            return False
        return self._most_in is None or self.transfers_in(target) < self._most_in

    def may_queue(self, target: InstanceView, request: RequestView) -> bool:
        """The target gets new work, may open another transfer, and could hold the request when empty."""
        if target.instance_id == request.instance_id or not self.takes_transfers(target):
            return False
        if not fits_model(target, request.context_tokens):
            return False
        return target.kv_capacity_tokens >= room_for(request, target)

    def may_receive(self, target: InstanceView, request: RequestView) -> bool:
        """The same, and it has room for the request: its whole context and one block to grow into."""
        return self.may_queue(target, request) and self.free_tokens(target) >= room_for(request, target)

    def book(self, request: RequestView, target: InstanceView, reason: str) -> Migrate:
        """Count a migration in, and return it."""
        name, source = target.instance_id, request.instance_id
        self._tokens[name] = self._tokens.get(name, 0) + room_for(request, target)
        self._in[name] = self._in.get(name, 0) + 1
        self._out[source] = self._out.get(source, 0) + 1
        self._moved.add(request.request_id)
        return Migrate(request.request_id, source, name, reason)


def room_for(request: RequestView, target: InstanceView) -> int:
    """KV tokens that a request takes on a target."""
    return kv_needed_tokens(max(request.kv_tokens, request.context_tokens), target.block_tokens)
