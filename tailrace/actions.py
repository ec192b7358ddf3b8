"""What a policy may decide. Pure data; the live scheduler and the simulator carry these out."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tailrace.cluster import Pool, Stage


class WhenFull(enum.Enum):
    """No room: not enough free KV, or no free seat in the batch."""

    # It waits at the target, first come, first served, while the request decodes on at its source (Arrow's
    # queue of KV migrations, section 5.4).
    WAIT = "wait"
    # It is refused, and the request stays (CascadeInfer, section 5).
    REFUSE = "refuse"
    # The request goes all the same, into the target's host memory, and waits there for its turn (PASCAL).
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Place:
    """Send an arriving request to an instance.

    `also`: what is carried out with the placement, such as the pool move that it needs (Arrow, Alg. 1).
    The placement holds whether or not that succeeds.

    `pull_from`: an instance that holds more of the request's prefix (`Arrival.cached`): its KV is fetched
    while earlier work runs, and the rest computed; all of it, if that fails. Empty: nobody.
    """

    instance_id: str
    also: tuple[Action, ...] = ()
    pull_from: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """No instance can take the request; `reason` reaches the user.

    `final`: it is not to wait for another answer (tailrace.control.admission).
    """

    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move a running request, KV included. `reason` is recorded with the migration."""

    request_id: str
    source_id: str
    target_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Have a running request's instance find by bid-ask who takes it over (CascadeInfer, section 4.4).

    `receiver_ids` are asked, the one that the view likes best first: an instance that cannot ask hands the
    request to that one. `most_tokens`: who would hold more KV with it, queued and to come included, does not
    bid; None: no limit. `reason` is recorded with the migration.
    """

    request_id: str
    source_id: str
    receiver_ids: tuple[str, ...]
    reason: str
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class HandBack:
    """Have an instance give back prompts that wait there, to be placed on other ones.

    Each waits where it is until it is placed elsewhere; one that has begun by then, or finds no other place,
    stays.
    """

    instance_id: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopyPrefix:
    """Copy the first `tokens` tokens' KV of a request's prompt into the prefix cache of another instance.

    Ahead of need: nobody waits for it, and it gives way to whatever users wait for there. `request_id`: one
    that `holder_id` has, waiting or running; it stays where it is.
    """

    request_id: str
    holder_id: str
    target_id: str
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetPool:
    """Move an instance between pools; None takes it out of all pools."""

    instance_id: str
    pool: Pool | None


@dataclass(frozen=True, slots=True)
class SetStages:
    """Replace the length stages."""

    stages: tuple[Stage, ...]


Placement = Place | Refuse
Action = Migrate | Offer | HandBack | CopyPrefix | SetPool | SetStages
