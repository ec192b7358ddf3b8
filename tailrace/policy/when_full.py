"""What becomes of a migration whose target has no room for it."""

from __future__ import annotations

import enum


class WhenFull(enum.Enum):
    """No room: not enough free KV, or no free seat in the batch."""

    # It waits at the target, first come, first served, while the request decodes on at its source (Arrow's
    # queue of KV migrations, section 5.4).
    WAIT = "wait"
    # It is refused, and the request stays (CascadeInfer, section 5).
    REFUSE = "refuse"
    # The request goes all the same, into the target's host memory, and waits there for its turn (PASCAL).
    HOST = "host"
