"""The process of vLLM's Python API server.

python -m frontend_svc.api_server.python_child BOOT_JSON VLLM_SERVE_ARG...
"""

from __future__ import annotations

import sys

from tailrace.collector import collector_paused


def main() -> None:
    """Entry point."""
    with collector_paused():
        from frontend_svc.api_server.device import require_no_device

        require_no_device()
        from frontend_svc.api_server.python_app import run
    run(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
