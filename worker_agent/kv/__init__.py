"""Transfer of KV blocks from worker to worker over UCX.

The two ends of a migration exchange their UCX addresses over gRPC, and the source gives the target a ticket.
The target requests an export's blocks, a chunk at a time; each reply consists of a header (identity and
checksum of every block) and the blocks' bytes. Several chunks are in flight, so that gathering and
verification overlap with the transfer.

Between processes of one host, bytes in host memory go through shared memory (`memory.py`). Everything else
uses the transport that UCX chooses (TCP, RDMA, CUDA); UCX_TLS and related variables work as UCX documents.
`ucx.py` has the measurements behind the parameters.
"""

import os

# Read when the library is loaded: ucxx sets a variable of its own, of which this UCX version would warn.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
