"""Tailrace: the control plane of a fleet of vLLM instances."""

import os

__version__ = "0.1.0"
TESTED_VLLM = ("0.30", "0.31", "0.32")
"""The versions of vLLM that live migration is tested with."""

# Nothing here forks without exec. gRPC's fork handlers would run between the two all the same, where now and
# then they crash the child (an API server, killed by signal 11). gRPC reads this when it is first used.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
