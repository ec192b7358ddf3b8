"""Requests that a model has no room for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.workloads.base import Workload, WorkloadError


@dataclass(frozen=True, slots=True)
class Fitted:
    """A workload whose requests all fit, and how many had to be changed for it."""

    workload: Workload
    # Prompts that were cut.
    clipped: int
    # Requests left out, because their output alone is too long.
    dropped: int


def fit(workload: Workload, max_model_len: int) -> Fitted:
    """Cut prompts so that prompt and output together have at most `max_model_len` tokens.

    The output stays as it is: it is what the model did. The source says how many were cut and left out.
    Raises WorkloadError when nothing is left.
    """
    if max_model_len < 2:
        raise WorkloadError(f"no request fits into {max_model_len} tokens")
    kept, clipped, dropped = [], 0, 0
    for request in workload.requests:
        room = max_model_len - request.output_tokens
        if room < 1:
            dropped += 1
        elif request.prompt_tokens > room:
            clipped += 1
            kept.append(replace(request, prompt_tokens=room))
        else:
            kept.append(request)
    if not kept:
        raise WorkloadError(f"{workload.name}: no request fits into {max_model_len} tokens")
    source = workload.source
    if clipped or dropped:
        of = len(workload.requests)
        source += f"; to fit {max_model_len} tokens {clipped} of {of} prompts cut, {dropped} left out"
    return Fitted(Workload(workload.name, kept, source), clipped, dropped)
