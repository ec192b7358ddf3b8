"""Experiments: what the papers claim, what else could be done, and how exact the simulator is.

They explore; nothing that runs in production imports them, and no wheel carries them.
"""

# First of all, because it turns gRPC's handlers of forks off, which can hang a process that is being started.
import tailrace  # noqa: F401
