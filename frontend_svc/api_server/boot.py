"""What `frontend_svc` hands to the Python API server that it starts."""

from __future__ import annotations

import msgspec


class PythonBoot(msgspec.Struct, frozen=True, kw_only=True):
    """Inherited file descriptors and the addresses behind them; JSON on the command line."""

    http_fd: int
    # As a URL, for the log.
    listen_address: str
    input_fd: int
    input_address: str
    output_fd: int
    output_address: str
    # File of the AdmissionFlag.
    admission_path: str
    # File of tenants and keys; empty: no key is asked for but vLLM's own.
    api_keys_path: str
    max_body_bytes: int
