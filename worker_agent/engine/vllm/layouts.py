"""A request's state by KV cache group, and which of its blocks are transferred.

A group consists of layers that keep their state in the same way: full attention (including latent attention)
keeps every block, a sliding window the blocks of its window, and recurrent layers one block with their state.
All groups allocate blocks from one pool, and a block's bytes are those of every layer's page at its number,
whatever its group, so blocks of all groups are read and written in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


@dataclass(frozen=True, slots=True)
class BlockPosition:
    """Block number `index` of a request in group `group`."""

    group: int
    index: int


class Layout:
    """The layout of a loaded engine. Engines with the same groups order positions identically."""

    def __init__(self, config: KVCacheConfig, manager: KVCacheManager) -> None:
        self._managers = list(manager.coordinator.single_type_managers)
        full = [
            number
            for number, group in enumerate(config.kv_cache_groups)
            if isinstance(group.kv_cache_spec, FullAttentionSpec)
        ]
        # The group whose full blocks are transferred in rounds while the request runs; None: no block is
        # final.
        self.main: int | None = full[0] if full else None
        # A single group that keeps all blocks: received blocks have final places from the first round on.
        self.plain = len(self._managers) == 1 and self.main == 0

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the main group, or of the first group if there is none."""
        return int(self._managers[self.main or 0].block_size)

    def full_blocks(self, computed: int) -> int:
        """Return how many blocks of a request with this many computed tokens are transferred in rounds."""
        return 0 if self.main is None else computed // self.block_tokens

    def positions(self, computed: int) -> list[BlockPosition]:
        """Return the positions that the request's next token depends on, starting with the main group's."""
        others = [number for number in range(len(self._managers)) if number != self.main]
        order = others if self.main is None else [self.main, *others]
        return [BlockPosition(group, index) for group in order for index in self._indices(group, computed)]

    def _indices(self, group: int, computed: int) -> range:
        manager = self._managers[group]
        first = manager.get_num_skipped_tokens(computed) // manager.block_size
        return range(first, cdiv(computed, manager.block_size))


def live_reason(config: KVCacheConfig) -> str:
    """Return why requests with this layout cannot migrate live; empty if they can."""
    for group in config.kv_cache_groups:
        for spec in _layer_specs(group.kv_cache_spec):
            if isinstance(spec, MambaSpec):
                if spec.mamba_cache_mode != "none":
                    return (
                        f"recurrent state in prefix caching's mode {spec.mamba_cache_mode!r} (with "
                        "enable_prefix_caching=false, requests migrate live)"
                    )
            elif type(spec) is not SlidingWindowSpec and not isinstance(spec, FullAttentionSpec):
                return f"{type(spec).__name__} KV cannot migrate live"
    if len({spec.page_size_bytes for spec in _all_specs(config)}) != 1:
        return "layers with KV pages of different sizes cannot migrate live"
    return ""


def layout_name(caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], config: KVCacheConfig) -> str:
    """Return a description that, with the model and its settings, must be equal for blocks to be
    compatible."""
    shapes = {
        name: [f"{tuple(each.shape[1:])} {each.dtype}" for each in _tensors(cache)]
        for name, cache in sorted(caches.items())
    }
    groups = [(repr(group.kv_cache_spec), list(group.layer_names)) for group in config.kv_cache_groups]
    return json.dumps([config.kv_cache_layout, groups, shapes])


def pages(
    caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], config: KVCacheConfig
) -> list[torch.Tensor]:
    """Return the KV cache as bytes: for each page of a block a view (blocks, bytes of the page).

    Layers of several groups may share the same bytes and then form one page. For a layout that cannot migrate
    live, returns only the first page. Raises RuntimeError if a tensor is not where the configuration puts it.
    """
    specs: dict[str, KVCacheSpec] = {}
    for group in config.kv_cache_groups:
        named = _named_specs(group.kv_cache_spec, group.layer_names)
        specs.update(zip(group.layer_names, named, strict=True))
    views: dict[tuple[int, int], torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        for number, name in enumerate(tensor.layers):
            cache = caches.get(name)
            if cache is None:
                continue
            layer = _tensors(cache)[0]
            memory = layer.untyped_storage()
            start = tensor.offset + number * tensor.layer_stride
            if layer.data_ptr() != memory.data_ptr() + start:
                if len(config.kv_cache_groups) == 1:
                    return [each for each in caches.values() if isinstance(each, torch.Tensor)]
                raise RuntimeError(f"the KV of {name} is not where vLLM's configuration places it")
            flat = torch.empty(0, dtype=torch.uint8, device=layer.device).set_(memory)
            shape = (config.num_blocks, specs[name].page_size_bytes)
            views[(memory.data_ptr(), start)] = flat.as_strided(shape, (tensor.block_stride, 1), start)
    found = list(views.values())
    return found[:1] if live_reason(config) else found


def _tensors(cache: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a layer's tensors; recurrent layers have one for each kind of state."""
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def _all_specs(config: KVCacheConfig) -> list[KVCacheSpec]:
    return [spec for group in config.kv_cache_groups for spec in _layer_specs(group.kv_cache_spec)]


def _layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _named_specs(spec: KVCacheSpec, names: Sequence[str]) -> list[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [spec.kv_cache_specs[name] for name in names]
    return [spec] * len(names)
