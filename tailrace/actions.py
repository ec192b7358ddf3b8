"""The actions that a policy may decide on. Pure data; the live scheduler and the simulator carry them out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from tailrace.cluster import Pool, Stage
from tailrace.handover import TRANSFERS


class WhenFull(enum.Enum):
    """What happens to a migration whose target has no room: too little free KV, or no free slot in the
    batch.

    With WAIT it also waits behind any number of other migrations to the target. With the others it is refused
    at once if it could only wait (`could_only_wait`): by its turn the policy might choose another target.
    """

    # Wait at the target in order of arrival while the request decodes at its source (Arrow's queue of KV
    # migrations, section 5.4).
    WAIT = "wait"
    # Refuse the migration; the request stays (CascadeInfer, section 5).
    REFUSE = "refuse"
    # Move the request into the target's host memory, where it waits for its turn (PASCAL).
    HOST = "host"


# Open migrations to an instance, those that wait for their turn included, beyond which one could only wait:
# three run at a time by default, and the turn of the others is near.
ORDERED_MAX: Final = 8


def could_only_wait(when_full: WhenFull, ordered: int, transfers: int = TRANSFERS) -> bool:
    """Return whether a migration to an instance must be refused for the `ordered` open ones to it.

    `transfers`: how many migrations to an instance run at a time.
    """
    return when_full is not WhenFull.WAIT and ordered >= max(ORDERED_MAX, transfers)


@dataclass(frozen=True, slots=True)
class Place:
    """Send an arriving request to an instance.

    `also`: actions carried out with the placement, such as the pool move that it needs (Arrow, Alg. 1). The
    placement holds whether or not they succeed.

    `pull_from`: an instance that holds more of the request's prefix (`Arrival.cached`). Its KV is pulled
    while earlier work runs, and the rest computed; if the pull fails, everything is computed. Empty: no pull.
    """

    instance_id: str
    also: tuple[Action, ...] = ()
    pull_from: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse a request: no instance can take it. `reason` reaches the user.

    `final`: the request must not wait and ask again (tailrace.control.admission).
    """

    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move a running request with its KV. `reason` is recorded with the migration."""

    request_id: str
    source_id: str
    target_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Have a running request's instance find by bid-ask which instance takes it over (CascadeInfer, section
    4.4).

    `receiver_ids` are asked; the first is the policy's preference, to which an instance without bid-ask hands
    the request over. `most_tokens`: an instance that would hold more KV with the request, including queued
    and expected KV, does not bid; None: no limit. `reason` is recorded with the migration.
    """

    request_id: str
    source_id: str
    receiver_ids: tuple[str, ...]
    reason: str
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ReturnPrompts:
    """Have an instance return prompts that wait there, to be placed on other instances.

    Each waits where it is until it is placed elsewhere; one that has begun by then, or finds no other
    instance, stays.
    """

    instance_id: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopyPrefix:
    """Copy the KV of the first `tokens` tokens of a request's prompt into another instance's prefix cache.

    It is done ahead of need and yields to everything that users wait for. `request_id`: a request that
    `holder_id` has, waiting or running; it stays there.
    """

    request_id: str
    holder_id: str
    target_id: str
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetPool:
    """Move an instance to a pool; None removes it from all pools."""

    instance_id: str
    pool: Pool | None


@dataclass(frozen=True, slots=True)
class SetStages:
    """Replace the length stages."""

    stages: tuple[Stage, ...]


Placement = Place | Refuse
Action = Migrate | Offer | ReturnPrompts | CopyPrefix | SetPool | SetStages

PULL_OUTCOMES: Final = (
    *("pulled", "shared", "held", "gone", "late"),
    *("refused", "lost", "corrupt", "none", "busy"),
)
"""How a worker may end a pull or a copy of a prefix, as counted in metrics."""
