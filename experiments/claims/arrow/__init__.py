"""Arrow (arXiv 2505.11916v1): its claims and their experiments.

`experiments(traces)` needs the public traces `azure_llm_2023/AzureLLMInferenceTrace_{code,conv}.csv` and
`mooncake/conversation_trace.jsonl` in the directory `traces`. Without them the affected rows are reported as
not reproducible, at no cost.
"""

from __future__ import annotations

from pathlib import Path

from experiments.claims.arrow.ablation import ablation
from experiments.claims.arrow.not_checked import not_checked
from experiments.claims.arrow.scalability import scalability
from experiments.claims.arrow.traces import trace_statistics
from experiments.claims.base import WHOLE, Effort, Experiment


def experiments(traces: Path | None, effort: Effort = WHOLE) -> tuple[Experiment, ...]:
    """Return all rows of Arrow; `traces` is the directory of the public traces, or None."""
    return (not_checked(), *ablation(traces, effort), scalability(traces), trace_statistics(traces))


EXPERIMENTS: tuple[Experiment, ...] = experiments(None)
