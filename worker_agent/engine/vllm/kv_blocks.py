"""Access to KV by block: gather, scatter and checksum over the tensors of all layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from worker_agent.engine.errors import EngineRefusal, KvCorrupt


class DeviceStaging:
    """A contiguous buffer in the memory that holds the KV: num_blocks * layers * bytes of a block's layer."""

    def __init__(self, data: torch.Tensor) -> None:
        """`data`: [blocks, layers, bytes of a block's layer], uint8."""
        self.bytes = data

    def part(self, first: int, num_blocks: int) -> DeviceStaging:
        """Return a view of some of its blocks."""
        return DeviceStaging(self.bytes[first : first + num_blocks])

    def copy(self) -> DeviceStaging:
        """Return a copy in other memory."""
        return DeviceStaging(self.bytes.clone())

    @property
    def buffer(self) -> object:
        """An object with the buffer protocol on the host, with __cuda_array_interface__ on a GPU."""
        flat = self.bytes.view(-1)
        return flat if flat.is_cuda else flat.numpy()


class KvBlocks:
    """KV in one tensor per layer, of any layout: the dimension that counts blocks is found by its length.

    A block's bytes are those of its slice in row-major order of the tensor's other dimensions. Safe to use
    from any thread for blocks that no other thread writes.
    """

    def __init__(self, layers: Sequence[torch.Tensor], num_blocks: int) -> None:
        if not layers:
            raise RuntimeError("the model has no KV cache")
        self._layers = [_by_block(layer, num_blocks) for layer in layers]
        first = self._layers[0]
        if any(layer.shape != first.shape or layer.dtype != first.dtype for layer in self._layers):
            raise RuntimeError("layers with KV of different shapes cannot be migrated")
        self.device = first.device
        self.num_layers = len(layers)
        self.layer_block_bytes = first[0].numel() * first.element_size()
        self.layout = f"{tuple(first.shape[1:])} {first.dtype}"
        on_gpu = first.device.type == "cuda"
        self._stream = torch.cuda.Stream(first.device) if on_gpu else None
        # Byte views on the host: copy and checksum one layer of a block at a time, while it is in the cache.
        on_host = not on_gpu and all(layer.stride(-1) == 1 for layer in self._layers)
        self._rows = [layer.view(torch.uint8).numpy() for layer in self._layers] if on_host else []
        self.checksum_name = "odd-weights" if on_gpu else "xxh3_64"

    def staging(self, num_blocks: int) -> DeviceStaging:
        """Allocate a buffer for num_blocks blocks in the KV's memory. Raise EngineRefusal without room."""
        shape = (num_blocks, self.num_layers, self.layer_block_bytes)
        # Allocate on the stream that uses it, or torch could return memory that a step in flight still uses.
        with _refusing_without_memory(), torch.cuda.stream(self._stream):
            return DeviceStaging(torch.empty(shape, dtype=torch.uint8, device=self.device))

    def staging_over(self, memory: npt.NDArray[np.uint8]) -> DeviceStaging | None:
        """Wrap host memory for a whole number of blocks as staging. Return None if the KV is on a GPU."""
        if self.device.type != "cpu":
            return None
        return DeviceStaging(torch.from_numpy(memory).view(-1, self.num_layers, self.layer_block_bytes))

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Run copies inside on KvBlocks' own stream, and wait for them at the end. Raise EngineRefusal if the
        device has no memory for them."""
        with _refusing_without_memory(), torch.inference_mode(), torch.cuda.stream(self._stream):
            yield
            if self._stream is not None:
                self._stream.synchronize()

    def wait_for_steps(self) -> None:
        """Order later work on this stream after the steps begun so far. Engine thread only."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def gather(self, block_ids: Sequence[int], out: DeviceStaging) -> list[int]:
        """Copy these blocks to the front of `out` and return their checksums."""
        if self._rows:
            return self._gather_on_host(block_ids, out.bytes.numpy())
        return self._gather_on_device(block_ids, out)

    @property
    def on_host(self) -> bool:
        """Whether `gather_to` can be used."""
        return bool(self._rows)

    def gather_to(self, block_ids: Sequence[int], memory: DeviceStaging, rows: Sequence[int]) -> list[int]:
        """Copy these blocks to these rows of `memory` and return their checksums. Only if `on_host`."""
        all_rows = memory.bytes.numpy()
        return self._gather_on_host(block_ids, [all_rows[row] for row in rows])

    def _gather_on_host(self, block_ids: Sequence[int], rows: Iterable[npt.NDArray[np.uint8]]) -> list[int]:
        """Copy each row once, and compute its checksum while it is in the CPU's cache."""
        shape = self._rows[0].shape[1:]
        sums: list[int] = []
        for row, block_id in zip(rows, block_ids, strict=False):
            checksum = xxhash.xxh3_64()
            for place, layer in zip(row, self._rows, strict=True):
                np.copyto(place.reshape(shape), layer[block_id])
                checksum.update(place)
            sums.append(checksum.intdigest())
        return sums

    def _gather_on_device(self, block_ids: Sequence[int], out: DeviceStaging) -> list[int]:
        # One kernel per layer, and one that puts each block's layers together: for a few blocks, only the
        # number of kernels matters.
        with self.stream():
            ids = torch.tensor(block_ids, dtype=torch.long, device=self.device)
            by_layer = self._by_layer(len(block_ids))
            for layer, rows in zip(self._layers, by_layer, strict=True):
                torch.index_select(layer, 0, ids, out=rows)
            self._words(out.bytes[: len(block_ids)]).copy_(self._words(by_layer).transpose(0, 1))
            return self._checksums(out, len(block_ids))

    def _by_layer(self, num_blocks: int) -> torch.Tensor:
        """Allocate [layers, blocks, the other dimensions of a layer]."""
        first = self._layers[0]
        shape = (self.num_layers, num_blocks, *first.shape[1:])
        return torch.empty(shape, dtype=first.dtype, device=self.device)

    def _words(self, blocks: torch.Tensor) -> torch.Tensor:
        """View the first two dimensions' blocks as rows of 64-bit words, which a device copies faster."""
        rows = blocks.view(*blocks.shape[:2], -1)
        return rows.view(torch.uint8 if self.layer_block_bytes % 8 else torch.int64)

    def verify(self, received: DeviceStaging, checksums: Sequence[int], first_block: int) -> None:
        """Raise KvCorrupt, naming the block, unless the first blocks of `received` have these checksums."""
        actual = self.checksums(received, len(checksums))
        for offset, (found, expected) in enumerate(zip(actual, checksums, strict=True)):
            if found != expected:
                raise KvCorrupt(
                    f"block {first_block + offset}: checksum {found:016x}, the source's is {expected:016x}"
                )

    def scatter(self, received: DeviceStaging, block_ids: Sequence[int]) -> None:
        """Copy the first blocks of `received` into these blocks of the KV cache."""
        if self._rows:
            shape = self._rows[0].shape[1:]
            for row, block_id in zip(received.bytes.numpy(), block_ids, strict=False):
                for place, layer in zip(row, self._rows, strict=True):
                    np.copyto(layer[block_id], place.reshape(shape))
            return
        with self.stream():
            ids = torch.tensor(block_ids, dtype=torch.long, device=self.device)
            by_layer = self._by_layer(len(block_ids))
            self._words(by_layer).copy_(self._words(received.bytes[: len(block_ids)]).transpose(0, 1))
            for layer, rows in zip(self._layers, by_layer, strict=True):
                layer.index_copy_(0, ids, rows)

    def zero(self, block_ids: Sequence[int]) -> None:
        """Fill these blocks with zeros."""
        with self.stream():
            ids = torch.tensor(block_ids, dtype=torch.long, device=self.device)
            for layer in self._layers:
                layer.index_fill_(0, ids, 0)

    def checksums(self, staging: DeviceStaging, num_blocks: int) -> list[int]:
        """Return the checksums of the first `num_blocks` blocks of `staging`."""
        with self.stream():
            return self._checksums(staging, num_blocks)

    def _checksums(self, staging: DeviceStaging, num_blocks: int) -> list[int]:
        blocks = staging.bytes[:num_blocks].view(num_blocks, -1)
        if blocks.is_cuda:
            return odd_weight_sums(blocks)
        return [xxhash.xxh3_64_intdigest(block.data) for block in blocks.numpy()]


@contextmanager
def _refusing_without_memory() -> Iterator[None]:
    """Refuse what the device has no memory for: serving requests goes first."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineRefusal(f"the device has no memory for a transfer: {error}") from error


def odd_weight_sums(blocks: torch.Tensor) -> list[int]:
    """Return a 64-bit checksum of each row of bytes, computed on the rows' device.

    The checksum is the sum, modulo 2**64, of the row's 64-bit words, each multiplied by its own odd weight.
    It detects any change of a single word, and swapped words except with a probability of 2**-63. The row's
    length must be a multiple of 8. Synchronises with the device.
    """
    words = blocks.view(torch.int64)
    place = torch.arange(1, words.shape[1] + 1, dtype=torch.int64, device=words.device)
    # The finaliser of the SplitMix64 generator (Steele et al., OOPSLA 2014), with its own constants.
    weight = place * -7046029254386353131
    weight = (weight ^ (weight >> 30)) * -4658895280553007687
    weight = (weight ^ (weight >> 27)) | 1
    return [total & 0xFFFFFFFFFFFFFFFF for total in (words * weight).sum(dim=1).tolist()]


def _by_block(layer: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a view whose first dimension counts the blocks of vLLM's block pool."""
    for dimension, length in enumerate(layer.shape):
        if length == num_blocks:
            return layer.movedim(dimension, 0)
        if length > num_blocks and length % num_blocks == 0 and dimension <= 1:
            # The attention kernel's blocks are smaller than the pool's, and consecutive.
            return layer.movedim(dimension, 0).unflatten(0, (num_blocks, length // num_blocks))
    raise RuntimeError(f"no dimension of the KV tensor {tuple(layer.shape)} counts its {num_blocks} blocks")
