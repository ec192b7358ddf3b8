"""Let vLLM look at the shipped model's class and remember what it saw, in its own cache.

It looks in a process of its own, half a minute on a small machine. Without this, every worker and API server
of the first cluster does, all at once.
"""

from __future__ import annotations

from pathlib import Path

from vllm.engine.arg_utils import EngineArgs

_MODEL = Path(__file__).parent.parent / "tailrace" / "tiny" / "model"

if __name__ == "__main__":
    EngineArgs(model=str(_MODEL)).create_model_config()
