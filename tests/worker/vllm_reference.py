"""Script of the engine's test: generates with plain vLLM in a separate process and prints the token IDs."""

import json
import os
import sys

from tailrace.collector import collector_paused

os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"})

with collector_paused():
    from vllm import LLM, SamplingParams


def main() -> None:
    job = json.loads(sys.stdin.read())
    llm = LLM(distributed_executor_backend="uni", disable_log_stats=True, **job["engine"])
    outputs = [
        llm.generate({"prompt_token_ids": prompt}, SamplingParams(**params), use_tqdm=False)[0]
        for prompt, params in job["requests"]
    ]
    print("RESULT " + json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main()
