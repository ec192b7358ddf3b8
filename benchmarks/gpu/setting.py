"""The scale of each part: on a GPU with 8B-sized weights, and on a CPU, only to check that it works."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.gpu.model import LLAMA_8B, SMALL, ModelShape


@dataclass(frozen=True)
class Setting:
    """All differences between GPU and CPU. Lengths in tokens."""

    device: str
    shape: ModelShape
    # Options of `tailrace serve worker` and of `vllm serve`, in addition to the model and its dummy weights.
    worker_options: tuple[str, ...]
    serve_options: tuple[str, ...]
    serve_environment: tuple[tuple[str, str], ...]
    # transfer: blocks in the pool, how many are transferred at a time, and tokens per block
    pool_blocks: int
    moved_blocks: tuple[int, ...]
    block_tokens: int
    # serving
    streams: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    rounds: int
    # migration
    moved_tokens: tuple[int, ...]
    others: int
    other_tokens: int
    repeats: int
    # lengths: requests in a batch, tokens of the shortest, mean tokens of a request, timed steps
    batch: int
    shortest: int
    mean_tokens: int
    steps: int
    backends: tuple[str, ...]
    # profile
    profile_budget_s: int


# For each of two instances. Set explicitly: vLLM derives it from the memory that is free before and after it
# loads, which changes when another instance loads at the same time.
KV_BYTES = 16_000_000_000

ON_GPU = Setting(
    device="cuda",
    shape=LLAMA_8B,
    worker_options=("--max-model-len", "40960", "--kv-cache-memory-bytes", str(KV_BYTES)),
    serve_options=("--max-model-len", "40960"),
    serve_environment=(),
    pool_blocks=4096,
    moved_blocks=(64, 512, 2048),
    block_tokens=16,
    streams=(1, 64, 256),
    prompt_tokens=512,
    output_tokens=256,
    rounds=3,
    moved_tokens=(1024, 8192, 32768),
    others=64,
    other_tokens=256,
    repeats=3,
    batch=512,
    shortest=32,
    mean_tokens=640,
    steps=48,
    backends=("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"),
    profile_budget_s=240,
)

ON_CPU = Setting(
    device="cpu",
    shape=SMALL,
    worker_options=("--max-model-len", "2048", "--kv-blocks", "512"),
    serve_options=(
        *("--max-model-len", "2048", "--num-gpu-blocks-override", "512", "--block-size", "32"),
        *("--enforce-eager", "--distributed-executor-backend", "uni"),
    ),
    serve_environment=(("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_CPU_KVCACHE_SPACE", "1")),
    pool_blocks=64,
    moved_blocks=(4, 16),
    block_tokens=32,
    streams=(1, 4),
    prompt_tokens=32,
    output_tokens=16,
    rounds=1,
    moved_tokens=(64, 256),
    others=2,
    other_tokens=32,
    repeats=1,
    batch=8,
    shortest=16,
    mean_tokens=64,
    steps=4,
    backends=("",),
    profile_budget_s=5,
)


class Budget:
    """Time budget of a part, in seconds; what does not fit is skipped and reported."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Remaining seconds, at least 0."""
        return max(0.0, self._end - time.monotonic())
