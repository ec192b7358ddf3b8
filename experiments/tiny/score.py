"""Score the shipped model with real vLLM: ``python -m experiments.tiny.score [-n 200] [-o table|json]``.

A completion is right only if every token of its thought and of its answer is the expected one. The margin is
the distance between the best and the second-best logit, over every token that was generated: as long as it is
far above rounding error, no batch composition, block size or machine can change a greedy completion.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from experiments.tiny.tokens import END_THINK, IM_END, THINK
from tailrace.tiny import MODEL_PATH
from tailrace.tiny.task import HELP_ANSWER, HELP_THOUGHT, Task, check, make_task

if TYPE_CHECKING:
    from vllm import LLM

BUCKETS: Final = (0, 100, 300, 1000, 3000)
"""Thought lengths at which the table starts a new row."""

FIRST_SEED: Final = 1_000_000
"""Where the seeds of scored tasks begin."""

Turns = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model generated for one conversation, split at its own tags."""

    thought: str
    answer: str
    well_formed: bool
    margin: float


@dataclass(frozen=True, slots=True)
class Row:
    """The score of one group of requests."""

    group: str
    requests: int
    right: float
    thought_min: int
    thought_median: float
    thought_max: int
    answer_min: int
    answer_median: float
    answer_max: int
    margin: float


Outcome = tuple[Task, Completion]


def score(n: int) -> list[Row]:
    """Run ``n`` counts, a quarter as many with a conversation before them, and as many other prompts."""
    from experiments.tiny.curriculum import anything, before

    draw = random.Random(FIRST_SEED)
    tasks = [make_task(FIRST_SEED + index) for index in range(n)]
    later = [make_task(FIRST_SEED + n + index) for index in range(max(1, n // 4))]
    others = [Task(anything(draw), HELP_THOUGHT, HELP_ANSWER) for _ in later]
    prompts = [*tasks, *later, *others]
    turns = [_user(task.prompt) for task in tasks]
    turns += [[{"role": r, "content": c} for r, c in before(draw)] + _user(task.prompt) for task in later]
    turns += [_user(task.prompt) for task in others]
    outcomes = list(zip(prompts, generate(load(), turns), strict=True))
    counted = outcomes[:n]
    rows = [
        _row(f"thought of {low} to {high - 1} tokens", inside)
        for low, high in pairwise(BUCKETS)
        if (inside := [outcome for outcome in counted if low <= outcome[0].thought_tokens < high])
    ]
    rows.append(_row("all counts", counted))
    rows.append(_row("counts later in a conversation", outcomes[n : n + len(later)]))
    rows.append(_row("anything else", outcomes[n + len(later) :]))
    return rows


def load(path: Path = MODEL_PATH) -> "LLM":
    """Load the model into a vLLM engine inside this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the score
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM

    return LLM(
        model=str(path),
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=32,
        enforce_eager=True,
        distributed_executor_backend="uni",
    )


def generate(llm: "LLM", conversations: Sequence[Turns]) -> list[Completion]:
    """Return greedy completions, in order."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=3400, logprobs=2, skip_special_tokens=False)
    outputs = llm.chat([*conversations], sampling, use_tqdm=False)
    return [_completion(output.outputs[0].token_ids, output.outputs[0].logprobs or []) for output in outputs]


def _completion(ids: Sequence[int], logprobs: object) -> Completion:
    if not isinstance(logprobs, Sequence):
        raise TypeError("vLLM returned no log-probabilities to take margins from")
    ids = list(ids)
    well_formed = ids[:1] == [THINK] and ids.count(END_THINK) == 1 and ids[-1:] == [IM_END]
    split = ids.index(END_THINK) if END_THINK in ids else len(ids)
    return Completion(_text(ids[:split]), _text(ids[split:]), well_formed, min(map(_margin, logprobs)))


def _margin(candidates: Mapping[int, object]) -> float:
    """Return the distance between best and second-best logit; it equals that of their log-probabilities."""
    values = sorted(float(getattr(candidate, "logprob")) for candidate in candidates.values())  # noqa: B009
    return values[-1] - values[-2]


def _text(ids: Sequence[int]) -> str:
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def _user(text: str) -> Turns:
    return [{"role": "user", "content": text}]


def _row(group: str, outcomes: Sequence[Outcome]) -> Row:
    right = [
        completion.well_formed and check(task, completion.thought, completion.answer).right
        for task, completion in outcomes
    ]
    thoughts = [len(completion.thought.encode()) for _, completion in outcomes]
    answers = [len(completion.answer.encode()) for _, completion in outcomes]
    return Row(
        group=group,
        requests=len(outcomes),
        right=sum(right) / len(right),
        thought_min=min(thoughts),
        thought_median=median(thoughts),
        thought_max=max(thoughts),
        answer_min=min(answers),
        answer_median=median(answers),
        answer_max=max(answers),
        margin=min(completion.margin for _, completion in outcomes),
    )


def as_table(rows: Sequence[Row]) -> str:
    """Format the score as a table."""
    lines = [
        f"{'requests':32} {'n':>5} {'right':>8} {'thought tokens':>21} {'answer tokens':>20} {'margin':>7}"
    ]
    for row in rows:
        thought = f"{row.thought_min} / {row.thought_median:.0f} / {row.thought_max}"
        answer = f"{row.answer_min} / {row.answer_median:.0f} / {row.answer_max}"
        lines.append(
            f"{row.group:32} {row.requests:5d} {row.right:8.2%} {thought:>21} {answer:>20} {row.margin:7.2f}"
        )
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> str:
    """Format the score as JSON."""
    from dataclasses import asdict

    return json.dumps([asdict(row) for row in rows], indent=2)


def main() -> None:
    """Read the command line, compute the score and print it."""
    parser = argparse.ArgumentParser(description="Score the tiny model with vLLM.")
    parser.add_argument("-n", type=int, default=200, help="counting tasks to run")
    parser.add_argument("-o", choices=("table", "json"), default="table", help="output format")
    options = parser.parse_args()
    rows = score(options.n)
    print(as_table(rows) if options.o == "table" else as_json(rows), file=sys.stdout)


if __name__ == "__main__":
    main()
