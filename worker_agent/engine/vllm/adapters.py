"""LoRA adapters: loaded before a request that names one is taken, so that a missing one fails that request
alone.

Each API server numbers the adapters that it knows by itself, and vLLM's engine goes by the number: two front
ends would mix theirs up. So they are numbered anew here, by name, path and version, and named by all three:
the name is part of the names of KV blocks, and another adapter, or another version, may have had it before.
"""

from __future__ import annotations

import itertools

from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from tailrace.adapter_versions import AdapterVersions, engine_name
from worker_agent.engine.errors import EngineRefusal


class Adapters:
    """Those that were loaded since the start; vLLM keeps the latest in memory. Engine thread only."""

    def __init__(self, config: VllmConfig, core: EngineCore) -> None:
        self._enabled = config.lora_config is not None
        # vLLM's CPU kernels give requests without an adapter, in a batch with others that have one, what is
        # in the last place (lora/ops/torch_ops index it by -1): there it must stay empty.
        cpu = config.device_config.device_type == "cpu"
        self._most = config.lora_config.max_loras - 1 if self._enabled and cpu else None
        self._core = core
        self._numbers = itertools.count(1)
        self._versions = AdapterVersions()
        # By name, path and version; the latest version by name and path; versions by our numbers.
        self._known: dict[tuple[str, str, str], LoRARequest] = {}
        self._latest: dict[tuple[str, str], str] = {}
        self._by_number: dict[int, str] = {}

    def load(self, asked: LoRARequest) -> LoRARequest:
        """The adapter as it is in its folder now, as this engine names and numbers it, in memory. Raises
        EngineRefusal."""
        return self._have(asked, self._versions.of(asked.lora_path))

    def of_request(self, asked: LoRARequest, version: str) -> LoRARequest:
        """The same for a request that came when this version was in the folder; empty: whatever is loaded.

        vLLM reads the folder again whenever it needs the place of an adapter: one that has changed is no
        longer the request's. Raises EngineRefusal.
        """
        if not version:
            latest = self._latest.get((asked.lora_name, asked.lora_path))
            return self._have(asked, self._versions.of(asked.lora_path) if latest is None else latest)
        there = self._versions.of(asked.lora_path)
        if there != version:
            raise EngineRefusal(
                f"adapter {asked.lora_name}: version {there or 'none'} is in {asked.lora_path} here, and "
                f"{version} was when the request came"
            )
        return self._have(asked, version)

    def version_of(self, own: LoRARequest | None) -> str:
        """Of an adapter as this engine numbers it; empty for none."""
        return "" if own is None else self._by_number.get(own.lora_int_id, "")

    def _have(self, asked: LoRARequest, version: str) -> LoRARequest:
        if not self._enabled:
            raise EngineRefusal(f"adapter {asked.lora_name}: this engine accepts no adapters (enable_lora)")
        key = (asked.lora_name, asked.lora_path, version)
        known = self._known.get(key)
        if known is None and self._most is not None and len(self._known) >= self._most:
            raise EngineRefusal(
                f"adapter {asked.lora_name}: on a CPU {self._most} can be loaded, one less than max_loras"
            )
        if known is None or asked.load_inplace:
            known = self._load(asked, version, next(self._numbers) if known is None else known.lora_int_id)
            self._known[key] = known
            self._latest[key[:2]] = self._by_number[known.lora_int_id] = version
        return known

    def _load(self, asked: LoRARequest, version: str, number: int) -> LoRARequest:
        name = engine_name(asked.lora_name, asked.lora_path, version)
        own = replace(asked, lora_name=name, lora_int_id=number)
        if asked.load_inplace:
            # Its KV is named as before, and will not be as before.
            self._core.reset_prefix_cache()
        try:
            self._core.add_lora(own)
        # Whatever is wrong with the files, the engine goes on without them.
        except Exception as error:
            reason = f"adapter {asked.lora_name} cannot be loaded from {asked.lora_path}: {error}"
            raise EngineRefusal(reason) from error
        if self._versions.of(asked.lora_path) != version:
            raise EngineRefusal(
                f"adapter {asked.lora_name}: {asked.lora_path} changed while it was being loaded"
            )
        return replace(own, load_inplace=False)
