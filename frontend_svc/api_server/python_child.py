"""The process of vLLM's Python API server, also on a host where vLLM's build finds no device.

python -m frontend_svc.api_server.python_child BOOT_JSON VLLM_SERVE_ARG...
"""

from __future__ import annotations

import logging
import sys

from tailrace.collector import collector_paused
from tailrace.telemetry.log_format import start_logging


def main() -> None:
    """Entry point."""
    # vLLM and uvicorn have handlers of their own; this is for the rest.
    start_logging("WARNING")
    # A library that vLLM imports sets the root logger to ERROR.
    for ours in ("frontend_svc", "tailrace"):
        logging.getLogger(ours).setLevel(logging.WARNING)
    with collector_paused():
        require_no_device()
        from frontend_svc.api_server.python_app import run
    run(sys.argv[1], sys.argv[2:])


def require_no_device() -> None:
    """Let vLLM be configured if no platform is active: give it one whose device is the host.

    Call it before anything else of vLLM is imported: modules bind `current_platform` when they are imported.

    vLLM's GPU build on a host or in a container without a visible GPU activates no platform, and its engine
    configuration then fails with "Device string must not be empty". An API server computes nothing on a
    device. vLLM's own CPU platform would not do: it refuses models in quantizations that only GPUs run, which
    the workers of the fleet may well serve.
    """
    from vllm import platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    class ApiServerPlatform(UnspecifiedPlatform):  # type: ignore[misc]
        """The host, for a process that only tokenizes and serves HTTP."""

        device_type = "cpu"
        device_name = "the host of an API server"

    if not platforms.current_platform.device_type:
        platforms._current_platform = ApiServerPlatform()


if __name__ == "__main__":
    main()
