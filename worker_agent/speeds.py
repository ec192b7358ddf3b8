"""Derive Arrow's two load quantities (section 5.3) from a worker's profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tailrace.perf.steps import max_running_tokens
from tailrace.perf.ttft import TtftPredictor
from tailrace.profiles import Profile
from tailrace.records import ProfileRecord
from tailrace.slo import DEFAULT_TPOT_S
from tailrace.store.membership import Membership
from worker_agent.settings import WorkerSettings

CONTEXT_TOKENS: Final = 1024
"""Assumed length of prompts and requests, the same as in tailrace.policy.arrow.policy."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The quantities of one worker. Without a profile there are none, and policies use their defaults."""

    ttft: TtftPredictor
    max_running_tokens: int

    @staticmethod
    def of(profile: Profile, tpot_s: float) -> Speeds:
        """Return the quantities for an engine's own profile. `tpot_s`: longest time between two tokens, in
        seconds."""
        return Speeds._with_limit(TtftPredictor.of_profile(profile), profile, tpot_s)

    @staticmethod
    def measured(record: ProfileRecord, tpot_s: float) -> Speeds:
        """Return the quantities for a profile measured on engines of its kind."""
        curve = record.ttft
        ttft = TtftPredictor(curve.base_s, curve.per_token_s, curve.per_token_squared_s)
        return Speeds._with_limit(ttft, record.profile, tpot_s)

    @staticmethod
    def _with_limit(ttft: TtftPredictor, profile: Profile, tpot_s: float) -> Speeds:
        return Speeds(ttft, max_running_tokens(profile, tpot_s, CONTEXT_TOKENS))

    def prefill_delay_s(self, backlog_tokens: int, prompts: Sequence[int]) -> float:
        """Return the seconds until a prefill that arrives now would start, behind prompts of these lengths
        (Eq. 2).

        `backlog_tokens` of the prompts are left to compute; any excess over their sum belongs to requests
        that are recomputed.
        """
        known = sum(prompts)
        if backlog_tokens > known:
            return self.ttft.queue_s(prompts) + self.ttft.backlog_s(backlog_tokens - known, 1)
        return self.ttft.queue_s(prompts) * backlog_tokens / known if known else 0.0


class KnownSpeeds:
    """Select the profile: the one given to the worker, else one measured for its kind, else the engine's own.

    Max Running Tokens is computed for the deployment's TPOT.
    """

    def __init__(
        self, profile: Profile | None, settings: WorkerSettings, kind: str, membership: Membership
    ) -> None:
        self._given = settings.profile is not None
        self._profile = settings.profile or profile
        self._kind = kind
        self._membership = membership
        # The inputs of the current speeds.
        self._source: tuple[ProfileRecord | None, float] | None = None
        self._speeds: Speeds | None = None

    def current(self) -> Speeds | None:
        """Return the speeds, or None if there is no profile. Fits are made once for each record and TPOT."""
        record = None if self._given else self._membership.profiles.get(self._kind)
        if record is None and self._source is not None:
            # A record that was removed is still better than the engine's own profile.
            record = self._source[0]
        source = record, slo_tpot_s(self._membership)
        if source != self._source:
            self._source, self._speeds = source, self._speeds_of(*source)
        return self._speeds

    def _speeds_of(self, record: ProfileRecord | None, tpot_s: float) -> Speeds | None:
        if record is not None:
            return Speeds.measured(record, tpot_s)
        return None if self._profile is None else Speeds.of(self._profile, tpot_s)


def slo_tpot_s(membership: Membership) -> float:
    """Return the deployment's TPOT in seconds, or the default if it sets none."""
    return membership.slo.tpot_s or DEFAULT_TPOT_S
