"""The fleet's membership, as every part of the services reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tailrace.cluster import Pool, Stage
from tailrace.records import InstanceRecord, ProfileRecord, ServiceRecord
from tailrace.rollout.record import RolloutRecord


class Members(Protocol):
    """Membership as read from etcd (`tailrace.store.membership.Membership`), or set by a test."""

    @property
    def instances(self) -> Mapping[str, InstanceRecord]:
        """Return the instances by id, including suspects."""

    @property
    def services(self) -> Mapping[tuple[str, str], ServiceRecord]:
        """Return the services by kind and id."""

    @property
    def leaders(self) -> Mapping[str, ServiceRecord]:
        """Return the elected service of each kind that elects one."""

    @property
    def pools(self) -> Mapping[str, Pool]:
        """Return the pools by instance id; an instance in no pool is absent."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the length stages; empty if there are none."""

    @property
    def profiles(self) -> Mapping[str, ProfileRecord]:
        """Return measured profiles by kind of instance."""

    @property
    def draining(self) -> frozenset[str]:
        """Return the ids of instances that get no new requests."""

    @property
    def leaving(self) -> frozenset[str]:
        """Return the draining instances that only a rollout drains."""

    @property
    def drained(self) -> frozenset[str]:
        """Return the ids that an operator drains, whether such instances exist or not."""

    @property
    def suspects(self) -> frozenset[str]:
        """Return the instances whose lease expired without a withdrawal."""

    @property
    def rollouts(self) -> Mapping[str, RolloutRecord]:
        """Return the last rollout of each public name: which model takes its new requests."""

    @property
    def unread_rollouts(self) -> frozenset[str]:
        """Return names whose rollout this version cannot read, and for which no earlier one is known."""

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Call back after every change. The callback must not block or raise."""
