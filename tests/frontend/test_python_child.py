"""vLLM's API server where no platform is active, as with its GPU build on a host without a visible GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tailrace.tiny import MODEL_PATH
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# Disable only the detection of platforms, in a separate process; everything else is unmodified vLLM.
_SCRIPT = """
import sys
# Without its platform, vLLM for CPUs takes the build of its kernels for AVX-512, which not every CPU has.
sys.modules["vllm._C"] = None
import vllm.platforms
vllm.platforms.builtin_platform_plugins.clear()
from frontend_svc.api_server.python_child import require_no_device
require_no_device()
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
for quantization in (None, "fp8"):
    args = AsyncEngineArgs(model=sys.argv[1], quantization=quantization)
    config = args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    print("configured", config.device_config.device_type, config.model_config.quantization)
"""


def test_api_server_is_configured_without_a_device() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(MODEL_PATH)], capture_output=True, text=True, timeout=WAIT_S
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "configured cpu None" in result.stdout
    assert "configured cpu fp8" in result.stdout
