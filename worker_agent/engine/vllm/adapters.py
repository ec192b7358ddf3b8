"""LoRA adapters, loaded before a request that names one is admitted, so that a missing adapter fails only
that request.

Each API server numbers its adapters independently, and vLLM's engine identifies them by number: those of two
front ends would be confused. Therefore they are renumbered here by name, path and version, and renamed after
all three: the name is part of the names of KV blocks, and other adapters or versions may have used it before.
"""

from __future__ import annotations

import itertools

from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from tailrace.model_identity import AdapterVersions, engine_name
from worker_agent.engine.errors import EngineRefusal


class Adapters:
    """The adapters loaded since the start; vLLM keeps the latest in memory. Engine thread only."""

    def __init__(self, config: VllmConfig, core: EngineCore) -> None:
        self._enabled = config.lora_config is not None
        # In mixed batches, vLLM's CPU kernels apply the adapter in the last slot to requests without one
        # (lora/ops/torch_ops index it by -1), so that slot must stay empty.
        cpu = config.device_config.device_type == "cpu"
        self._max_loaded = config.lora_config.max_loras - 1 if self._enabled and cpu else None
        self._core = core
        self._numbers = itertools.count(1)
        self._versions = AdapterVersions()
        # By name, path and version; the latest version by name and path; versions by our numbers.
        self._known: dict[tuple[str, str, str], LoRARequest] = {}
        self._latest: dict[tuple[str, str], str] = {}
        self._by_number: dict[int, str] = {}

    def load(self, asked: LoRARequest) -> LoRARequest:
        """Load the version that is in the adapter's folder now, and return it with this engine's name and
        number. Raises EngineRefusal."""
        return self._loaded(asked, self._versions.of(asked.lora_path))

    def of_request(self, asked: LoRARequest, version: str) -> LoRARequest:
        """Load the adapter of a request that was submitted when this version was in the folder; empty: the
        loaded version, if any. Nothing is loaded in place: that was done when the load was asked for.

        vLLM may read the folder again at any time, so a folder that has changed no longer serves the request.
        Raises EngineRefusal.
        """
        asked = replace(asked, load_inplace=False)
        if not version:
            latest = self._latest.get((asked.lora_name, asked.lora_path))
            return self._loaded(asked, self._versions.of(asked.lora_path) if latest is None else latest)
        current = self._versions.of(asked.lora_path)
        if current != version:
            raise EngineRefusal(
                f"adapter {asked.lora_name}: version {current or 'none'} is in {asked.lora_path} here, and "
                f"{version} was when the request came"
            )
        return self._loaded(asked, version)

    def version_of(self, own: LoRARequest | None) -> str:
        """Return the version of an adapter with this engine's number; empty for None."""
        return "" if own is None else self._by_number.get(own.lora_int_id, "")

    def _loaded(self, asked: LoRARequest, version: str) -> LoRARequest:
        if not self._enabled:
            raise EngineRefusal(f"adapter {asked.lora_name}: this engine accepts no adapters (enable_lora)")
        key = (asked.lora_name, asked.lora_path, version)
        known = self._known.get(key)
        if known is None and self._max_loaded is not None and len(self._known) >= self._max_loaded:
            raise EngineRefusal(
                f"adapter {asked.lora_name}: on a CPU {self._max_loaded} can be loaded, "
                "one less than max_loras"
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
            # The KV blocks of the new weights will have the same names as those of the old ones.
            self._core.reset_prefix_cache()
        try:
            self._core.add_lora(own)
        # The engine must survive any error in the adapter's files.
        except Exception as error:
            # With the client's name for it: by these words, vLLM's API server tells an adapter that does not
            # exist (404) from other failures.
            words = str(error).replace(name, asked.lora_name)
            reason = f"adapter {asked.lora_name} cannot be loaded from {asked.lora_path}: {words}"
            raise EngineRefusal(reason) from error
        if self._versions.of(asked.lora_path) != version:
            raise EngineRefusal(
                f"adapter {asked.lora_name}: {asked.lora_path} changed while it was being loaded"
            )
        return replace(own, load_inplace=False)
