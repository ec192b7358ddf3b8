"""Measure the decode steps of one vLLM engine for batches with each distribution of lengths, into a file.

vLLM prints to stdout too, on a GPU even while it exits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.lengths import BASE, SHAPES, spread
from benchmarks.gpu.model import prompt_ids
from benchmarks.gpu.setting import ON_CPU, ON_GPU, Setting

if TYPE_CHECKING:
    from vllm import LLM

# Steps after the last prefill that do not count.
_SETTLE = 4


def engine(setting: Setting, model: Path, backend: str) -> LLM:
    """Create an engine core in this process, so that a step is a call."""
    os.environ.update(setting.serve_environment)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM

    small = {"enforce_eager": True, "num_gpu_blocks_override": 512, "block_size": 32}
    return LLM(
        model=str(model),
        load_format="dummy",
        max_num_seqs=setting.batch,
        max_model_len=40960 if setting.device == "cuda" else 2048,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        **({"attention_config": {"backend": backend}} if backend else {}),
        **(small if setting.device == "cpu" else {}),
    )


def capacity_tokens(llm: LLM) -> int:
    """Return the capacity of the KV cache in tokens."""
    cache = llm.llm_engine.vllm_config.cache_config
    blocks = cache.num_gpu_blocks
    assert blocks is not None
    return int(blocks) * int(cache.block_size)


def step_ms(llm: LLM, setting: Setting, lengths: list[int], seed: int) -> float:
    """Return the median milliseconds of a step in which all requests decode."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    core = llm.llm_engine
    options = SamplingParams(max_tokens=4096, ignore_eos=True, temperature=0, detokenize=False)
    names = [f"{seed}-{number}" for number in range(len(lengths))]
    for number, (name, length) in enumerate(zip(names, lengths, strict=True)):
        tokens = prompt_ids(length, setting.shape.vocab_size, 1000 * seed + number)
        core.add_request(name, TokensPrompt(prompt_token_ids=tokens), options)
    waiting = set(names)
    while waiting:
        waiting -= {output.request_id for output in core.step()}
    durations = []
    for turn in range(_SETTLE + setting.steps):
        started_s = time.perf_counter()
        core.step()
        if turn >= _SETTLE:
            durations.append((time.perf_counter() - started_s) * 1000)
    core.abort_request(names)
    while core.has_unfinished_requests():
        core.step()
    return statistics.median(durations)


def main() -> None:
    """Measure every shape, and the minimal lengths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument(
        "--backend", default="", help="vLLM's name of an attention backend; default: vLLM's choice"
    )
    options = parser.parse_args()
    setting = ON_GPU if options.device == "cuda" else ON_CPU
    llm = engine(setting, options.model, options.backend)
    # Leave KV for tokens decoded during prefill and the timed steps.
    available_tokens = int(0.95 * capacity_tokens(llm)) - setting.batch * (setting.steps + 160)
    total = min(setting.batch * setting.mean_tokens, available_tokens)
    times = {BASE: step_ms(llm, setting, [setting.shortest] * setting.batch, 1)}
    for number, shape in enumerate(SHAPES):
        lengths = spread(shape, setting.batch, total, setting.shortest)
        times[shape] = step_ms(llm, setting, lengths, 2 + number)
    figures = {"total_kv_tokens": total, "capacity_tokens": capacity_tokens(llm), "step_ms": times}
    options.out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
