"""KV blocks from worker to worker over UCX.

A migration's two ends tell each other their UCX addresses over gRPC, and the source gives the target a
ticket. The target asks for an export's blocks, a chunk at a time; each answer is a header (identity and
checksum of every block) and the blocks' bytes. Several chunks are under way, so that gathering and checking
overlap the wire.

Between processes of one host, bytes of host memory are written where the other reads them (`segments.py`).
Everything else goes over the transport that UCX chooses (TCP, RDMA, CUDA); UCX_TLS and its kin work as
documented there. What was measured and chosen is in `transport.py`.
"""

import os

# Read when the library is loaded: ucxx sets a variable of its own that this UCX would warn of.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
