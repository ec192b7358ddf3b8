"""Replay a recorded run of one engine in the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.validation.errors import ComparedRequest, Errors, compare, errors
from experiments.validation.recorded import RecordedRun
from simulator.cluster import ClusterSpec, InstanceSpec
from simulator.request import SimRequest
from simulator.simulation import simulate
from tailrace.intra.orders import Fcfs
from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.policy.round_robin import RoundRobin
from tailrace.profiles import Profile


class ReplayError(Exception):
    """The simulator did not do what the engine did; the message says where."""


@dataclass(frozen=True, slots=True)
class Validation:
    """A run and its simulation. `requests` are in the order of arrival."""

    run: RecordedRun
    profile: str
    requests: tuple[ComparedRequest, ...]
    errors: Errors
    preemptions: int


def validate(run: RecordedRun, profile: Profile, penalty: FittedLengthPenalty | None = None) -> Validation:
    """Simulate the run's requests on one instance with the run's limits. Raise ReplayError.

    As in vLLM since its V1 engine: first come, first served, no blocks reserved at admission, and preempted
    requests are recomputed. A request reaches the engine `path_s` after its arrival.
    """
    instance = InstanceSpec(
        "i000",
        profile,
        kv_capacity_tokens=run.kv_capacity_tokens,
        block_tokens=run.block_tokens,
        host_kv_bytes=0,
        max_num_seqs=run.max_num_seqs,
        chunk_budget_tokens=run.chunk_budget_tokens,
        max_model_len=run.max_model_len,
        penalty=penalty,
    )
    requests = [
        SimRequest(
            request_id=request.request_id,
            arrival_s=request.arrival_s + run.path_s,
            prompt_tokens=request.prompt_tokens,
            reasoning_tokens=0,
            answer_tokens=request.output_tokens,
        )
        for request in run.requests
    ]
    result = simulate(ClusterSpec((instance,)), requests, RoundRobin(), Fcfs(watermark=0.0))
    compared: list[ComparedRequest] = []
    for request, record in zip(run.requests, result.requests, strict=True):
        if record.first_token_s is None or record.finish_s is None:
            raise ReplayError(f"request {request.request_id!r} was refused: {record.refused}")
        compared.append(compare(request, record.first_token_s, record.finish_s))
    return Validation(
        run=run,
        profile=profile.name,
        requests=tuple(compared),
        errors=errors(compared),
        preemptions=sum(record.preemptions_recomputed for record in result.requests),
    )
