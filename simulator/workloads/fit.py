"""Fit requests into a model's maximum length."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.workloads.base import Workload, WorkloadError


@dataclass(frozen=True, slots=True)
class FitResult:
    """A workload whose requests all fit, and how many requests were changed for that."""

    workload: Workload
    # Prompts that were truncated.
    clipped: int
    # Requests left out because their output alone is too long.
    dropped: int


def fit(workload: Workload, max_model_len: int) -> FitResult:
    """Truncate prompts so that prompt and output together have at most `max_model_len` tokens.

    Outputs are not changed, since they are what the model produced. The source states how many prompts were
    truncated and how many requests left out. Raise WorkloadError if no request is left.
    """
    if max_model_len < 2:
        raise WorkloadError(f"no request fits into {max_model_len} tokens")
    fitting, clipped, dropped = [], 0, 0
    for request in workload.requests:
        room = max_model_len - request.output_tokens
        if room < 1:
            dropped += 1
        elif request.prompt_tokens > room:
            clipped += 1
            fitting.append(replace(request, prompt_tokens=room))
        else:
            fitting.append(request)
    if not fitting:
        raise WorkloadError(f"{workload.name}: no request fits into {max_model_len} tokens")
    source = workload.source
    if clipped or dropped:
        total = len(workload.requests)
        source += f"; to fit {max_model_len} tokens {clipped} of {total} prompts cut, {dropped} left out"
    return FitResult(Workload(workload.name, fitting, source), clipped, dropped)
