"""The policy that decides now."""

from __future__ import annotations

import asyncio
import logging

from tailrace.policy.base import Policy
from tailrace.policy.registry import UnknownPolicyError, UnusablePolicyError, load, names

log = logging.getLogger(__name__)


class ActivePolicy:
    """Follows the name in etcd; without one, the default given at start."""

    def __init__(self, default: str) -> None:
        """Raises UnknownPolicyError, UnusablePolicyError."""
        self.name = default
        self.policy: Policy = load(default)
        self._default = default
        self._refused = ""

    def follow(self, name: str | None) -> None:
        """Switch to the policy of that name. One that cannot be had leaves the present one in force."""
        wanted = name or self._default
        if wanted in (self.name, self._refused):
            return
        try:
            self.policy = load(wanted)
        except (UnknownPolicyError, UnusablePolicyError) as error:
            # Said once, not at every change of anything in etcd.
            self._refused = wanted
            log.error("cannot switch to policy %s, keeping %s: %s", wanted, self.name, error)
            return
        log.info("policy %s -> %s", self.name, wanted)
        self.name, self._refused = wanted, ""


async def warm_up() -> None:
    """Import all policies in a thread, so that the first switch to one holds no placement up for as long as
    its modules take."""
    for name in await asyncio.to_thread(names):
        try:
            await asyncio.to_thread(load, name)
        except (UnknownPolicyError, UnusablePolicyError) as error:
            log.warning("%s", error)
