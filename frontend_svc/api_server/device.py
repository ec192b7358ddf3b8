"""Let vLLM's API server start where its build finds no device.

vLLM's GPU build on a host or in a container without a visible GPU activates no platform, and its engine
configuration then fails with "Device string must not be empty". An API server computes nothing on a device:
where no platform is active it gets one whose device is the host. vLLM's own CPU platform would not do: it
refuses models in quantizations that only GPUs run, which the workers of the fleet may well serve.
"""

from __future__ import annotations

from vllm import platforms
from vllm.platforms.interface import UnspecifiedPlatform


class ApiServerPlatform(UnspecifiedPlatform):  # type: ignore[misc]
    """The host, for a process that only tokenizes and serves HTTP."""

    device_type = "cpu"
    device_name = "the host of an API server"


def require_no_device() -> None:
    """Install ApiServerPlatform if no platform is active.

    Call it before anything else of vLLM is imported: modules bind `current_platform` when they are imported.
    """
    if not platforms.current_platform.device_type:
        platforms._current_platform = ApiServerPlatform()
