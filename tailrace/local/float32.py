"""Whether vLLM would serve a model in less precision than its weights have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tailrace.tiny import MODEL_PATH


def loses_precision(model: str, worker_arguments: Sequence[str]) -> bool:
    """Return whether the model folder holds float32 weights and no dtype is given to the workers.

    vLLM's `dtype=auto` serves float32 weights in 16 bits, which changes answers. The shipped model is served
    as it was trained. A model named on a hub is not looked at: its configuration is not here yet.
    """
    folder = Path(model).expanduser()
    if folder.resolve() == MODEL_PATH or any("dtype" in argument for argument in worker_arguments):
        return False
    try:
        config: object = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "float32" in (config.get("torch_dtype"), config.get("dtype"))
