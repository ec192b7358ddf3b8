"""Which policy is in force: as the record in etcd says, or the default."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from tailrace.control.admission import TtftAdmission
from tailrace.policy.base import Policy
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.policy.parameters import ParameterError, Value, format_value
from tailrace.policy.registry import (
    UnknownPolicyError,
    UnusablePolicyError,
    all_parameters,
    declared,
    load,
    load_all,
    names,
    problem_of,
)
from tailrace.records import PolicyRecord
from tailrace.slo import Slo

log = logging.getLogger(__name__)

FALLBACK_POLICY: Final = "least_loaded"
"""The policy that decides where another one failed, or is suspended."""


class ActivePolicy:
    """Follow the policy record in etcd and the deployment's SLOs; without a record, the default given at
    start."""

    def __init__(self, default: PolicyRecord, slo: Slo | None = None) -> None:
        """Load the default. Raise UnknownPolicyError, UnusablePolicyError or ParameterError."""
        self.slo = slo or Slo()
        self.record = self.default = default
        self.policy = _load(default, self.slo)
        # All parameters in force, including those of the batch order.
        self.values: Mapping[str, Value] = all_parameters(default.name, default.parameters)
        self._refused: PolicyRecord | None = None

    @property
    def policy(self) -> Policy:
        """Return the policy that decides."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy, self.declared = policy, declared(self.record.name, policy)

    @property
    def name(self) -> str:
        """Return the name of the policy that decides: `least_loaded` while the one that was set is
        suspended."""
        return FALLBACK_POLICY if self.record.suspended else self.record.name

    @property
    def admission(self) -> TtftAdmission | None:
        """Return the rule by which requests are refused as too late; None if none is refused."""
        return TtftAdmission.of(self.slo)

    def follow(self, record: PolicyRecord | None, slo: Slo) -> None:
        """Decide by this policy and for these SLOs. If the policy cannot be loaded, the present one continues
        with the SLOs."""
        requested = record or self.default
        if requested == self._refused:
            # Refused before: logged once, not at every change in etcd.
            requested = self.record
        if not self._try_switch(requested, slo):
            self._refused = requested
            self._try_switch(self.record, slo)

    def _try_switch(self, record: PolicyRecord, slo: Slo) -> bool:
        """Switch if the policy can be loaded; return whether it could."""
        try:
            self.switch(record, slo)
        except (UnknownPolicyError, UnusablePolicyError, ParameterError) as error:
            log.error("cannot switch to policy %s, keeping %s: %s", record.name, self.name, error)
            return False
        # A record that nobody foresaw must not keep a scheduler from starting.
        except Exception:
            log.exception("cannot switch to policy %s, keeping %s", record.name, self.name)
            return False
        return True

    def switch(self, record: PolicyRecord, slo: Slo) -> None:
        """Decide by this policy and for these SLOs.

        Raise UnknownPolicyError, UnusablePolicyError or ParameterError; then nothing has changed.
        """
        if (record, slo) == (self.record, self.slo):
            return
        policy = _load(record, slo)
        # Those of a suspended policy's batch order, which the workers keep.
        values = self.values
        if not record.suspended:
            values = all_parameters(record.name, record.parameters)
        log.info(
            "policy %s -> %s; SLO: %s", _format_record(self.record), _format_record(record), slo.describe()
        )
        if record != self.record:
            self._refused = None
        self.policy = policy
        self.record, self.values, self.slo = record, values, slo


def _load(record: PolicyRecord, slo: Slo) -> Policy:
    """Create the policy that decides for this record. Raise as `load` does."""
    return LeastLoaded() if record.suspended else load(record.name, parameters=record.parameters, slo=slo)


def _format_record(record: PolicyRecord) -> str:
    values = [f"{name}={format_value(value)}" for name, value in record.parameters.items()]
    suspended = [f"(suspended: {record.suspended})"] if record.suspended else []
    return " ".join([record.name, *values, *suspended])


async def warm_up() -> None:
    """Import all policies in a thread, so that the first switch to one does not delay placements by its
    import."""
    await asyncio.to_thread(load_all)
    for name in names():
        if problem := problem_of(name):
            log.warning("%s", problem)
