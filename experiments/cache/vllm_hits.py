"""Run plain vLLM in a process of its own: count how many tokens of each prompt its prefix cache has.

Reads a job from standard input: arguments of the engine, and requests in order, each with the tokens that it
adds to its session's context, and the length of its answer. Requests run one at a time; then, with an empty
cache, the same prompts run concurrently. Prints one line: `RESULT` and JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Final

from tailrace.collector import collector_paused

os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"})

with collector_paused():
    from vllm import LLM, SamplingParams

MARK: Final = "RESULT "


def main() -> None:
    """Run the job."""
    job = json.loads(sys.stdin.read())
    engine = LLM(
        distributed_executor_backend="uni",
        disable_log_stats=True,
        enforce_eager=True,
        enable_prefix_caching=True,
        **job["engine"],
    )
    contexts: dict[str, list[int]] = {}
    prompts: list[list[int]] = []
    alone: list[int] = []
    for session, added, answer in job["requests"]:
        prompt = contexts.setdefault(session, []) + added
        (output,) = engine.generate({"prompt_token_ids": prompt}, _sampling(answer), use_tqdm=False)
        prompts.append(prompt)
        alone.append(output.num_cached_tokens or 0)
        contexts[session] = prompt + list(output.outputs[0].token_ids)
    engine.reset_prefix_cache()
    together = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [_sampling(answer) for _, _, answer in job["requests"]],
        use_tqdm=False,
    )
    found = [output.num_cached_tokens or 0 for output in together]
    print(MARK + json.dumps({"alone": alone, "together": found, "prompts": [len(p) for p in prompts]}))


def _sampling(tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
    )


if __name__ == "__main__":
    main()
