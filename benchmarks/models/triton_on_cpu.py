"""vLLM's Model Runner V2 without a GPU. For tests alone: slow.

V2 is written in Triton. vLLM's CPU build believes in Triton when there is a backend called "cpu" whose driver
is active; Triton's interpreter runs kernels on tensors of the CPU and needs none. So a backend in name is all
that is missing.
"""

from __future__ import annotations

import os


class _Driver:
    """Only ever asked whether it is there."""

    @staticmethod
    def is_active() -> bool:
        """It is."""
        return True


def use_model_runner_v2() -> None:
    """Call before vLLM or Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from triton import backends  # type: ignore[import-untyped]

    given = backends.backends["nvidia"]
    backends.backends["cpu"] = type(given)(given.compiler, _Driver)
