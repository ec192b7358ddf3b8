"""When an engine loads an adapter; see test_vllm_features.py for real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from worker_agent.engine.vllm.adapters import Adapters

pytestmark = pytest.mark.vllm


class Core:
    """Note what is loaded."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.resets = 0

    def add_lora(self, request: LoRARequest) -> None:
        self.loaded.append(request.lora_path)

    def reset_prefix_cache(self) -> None:
        self.resets += 1


def test_requests_load_nothing_in_place() -> None:
    """vLLM's API server marks all requests of an adapter that was once loaded in place."""
    core: Any = Core()
    config: Any = SimpleNamespace(
        lora_config=SimpleNamespace(max_loras=3), device_config=SimpleNamespace(device_type="cuda")
    )
    adapters = Adapters(config, core)
    asked = LoRARequest("a", 7, "/nowhere", load_inplace=True)
    adapters.load(asked)
    adapters.load(asked)
    assert (core.loaded, core.resets) == (["/nowhere"] * 2, 2)
    assert not adapters.of_request(asked, "").load_inplace
    assert (core.loaded, core.resets) == (["/nowhere"] * 2, 2)
