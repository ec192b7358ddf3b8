"""KV blocks from worker to worker over UCX.

A target connects to the source's listener and asks for a range of an export's blocks; the answer comes in
chunks, each a header (identity and checksum of every block) and the blocks' bytes. Two chunks are under way
at either end, so that gathering and checking overlap the wire.

Which transport carries them (shared memory, TCP, RDMA, CUDA) is UCX's choice; UCX_TLS and its kin work as
documented there. What was measured and chosen is in `transport.py`.
"""

import os

# Read when the library is loaded: ucxx sets a variable of its own that this UCX would warn of.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
