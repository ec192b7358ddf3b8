"""The policy that decides now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from tailrace.intra.base import QUANTUM
from tailrace.policy.base import Policy
from tailrace.policy.parameters import ParameterError, Value, format_value
from tailrace.policy.registry import (
    UnknownPolicyError,
    UnusablePolicyError,
    all_parameters,
    load,
    names,
)
from tailrace.records import PolicyRecord
from tailrace.slo import Slo

log = logging.getLogger(__name__)


class ActivePolicy:
    """Follows the record in etcd and the deployment's SLOs; without a record, the default given at start."""

    def __init__(self, default: PolicyRecord, slo: Slo | None = None) -> None:
        """Raises UnknownPolicyError, UnusablePolicyError, ParameterError."""
        self.slo = slo or Slo()
        self.record = self.default = default
        self.policy: Policy = load(default.name, parameters=default.parameters, slo=self.slo)
        # All parameters that are in force, those of the batch order included.
        self.values: Mapping[str, Value] = all_parameters(default.name, default.parameters)
        self._refused: PolicyRecord | None = None

    @property
    def name(self) -> str:
        """Of the policy."""
        return self.record.name

    @property
    def quantum_tokens(self) -> int:
        """The quantum by which the policy counts fresh answers; the usual one if it has none."""
        return int(self.values.get(QUANTUM.name, QUANTUM.default))

    def follow(self, record: PolicyRecord | None, slo: Slo) -> None:
        """Decide by that policy and for those SLOs. A policy that cannot be had leaves the present one in
        force, for the new SLOs."""
        wanted = record or self.default
        if wanted == self._refused:
            # Logged once, not at every change of anything in etcd.
            wanted = self.record
        if not self._can_switch(wanted, slo):
            self._refused = wanted
            self._can_switch(self.record, slo)

    def _can_switch(self, record: PolicyRecord, slo: Slo) -> bool:
        """Switch if that policy can be had; whether it can."""
        try:
            self.switch(record, slo)
        except (UnknownPolicyError, UnusablePolicyError, ParameterError) as error:
            log.error("cannot switch to policy %s, keeping %s: %s", record.name, self.name, error)
            return False
        return True

    def switch(self, record: PolicyRecord, slo: Slo) -> None:
        """Decide by that policy and for those SLOs.

        Raises UnknownPolicyError, UnusablePolicyError, ParameterError; nothing has changed then.
        """
        if (record, slo) == (self.record, self.slo):
            return
        policy = load(record.name, parameters=record.parameters, slo=slo)
        values = all_parameters(record.name, record.parameters)
        log.info("policy %s -> %s; SLO: %s", _words(self.record), _words(record), slo.words())
        if record != self.record:
            self._refused = None
        self.record, self.policy, self.values, self.slo = record, policy, values, slo


def _words(record: PolicyRecord) -> str:
    return " ".join([record.name, *(f"{name}={format_value(v)}" for name, v in record.parameters.items())])


async def warm_up() -> None:
    """Import all policies in a thread, so that the first switch to one holds no placement up for as long as
    its modules take."""
    for name in await asyncio.to_thread(names):
        try:
            await asyncio.to_thread(load, name)
        except (UnknownPolicyError, UnusablePolicyError) as error:
            log.warning("%s", error)
