"""C9: how well the QoE model predicts normalized latency (sections 4.1 and 6.5, figure 13).

Profiling follows section 4.1: by exponential buckets of length, at batch sizes up to the cap, each kept in
flight. Here the batch size is held by the engine's limit, with all others queued; latency counts from
admission. The model is fitted on one set of requests and validated on another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from experiments.claims.base import Claim, Experiment, Figures, Finding, Run
from experiments.claims.cascade.cluster import BATCH, FIGURE_2, PENALTY_INPUT, llama_on_h20
from experiments.claims.verdicts import judge_bound, judge_effect, number, weakest
from simulator.cluster import ClusterSpec
from simulator.records import RequestRecord
from simulator.request import SimRequest
from simulator.simulation import simulate
from simulator.workloads.generators import GENERATORS
from tailrace.intra.orders import Fcfs
from tailrace.perf.length_penalty import load_length_penalty
from tailrace.perf.qoe_model import FEATURES, QoeModel, mean_relative_error
from tailrace.policy.least_loaded import LeastLoaded

C9 = Claim(
    "C9", "CascadeInfer", "Fig. 13", "mean relative error: QoE model; global mean", "8.9%; 64%", PENALTY_INPUT
)
_NAME: Final = "cascade-prediction"
_FIT_SEED, _VALIDATION_SEED = 10, 11
# Buckets [100, 200), [200, 400), ... as in the paper's example; shorter requests are discarded.
_SHORTEST: Final = 100
_BUCKETS: Final = 6
# 1, 4, 16, ... 1,024: every second of the paper's, to save time.
_BATCHES: Final = tuple(4**power for power in range(6) if 4**power <= BATCH)
# Requests of a configuration, in batches: 1.5 times the number in flight.
_ROUNDS: Final = 1.5
_DRAWN: Final = 20_000
# Points in time at which batches are sampled.
_MOMENTS: Final = 256

Floats = NDArray[np.float64]


def prediction() -> Experiment:
    """Return the experiment, one run: the fit needs the samples of all configurations."""
    return Experiment(_NAME, (C9,), (Run(f"{_NAME}/all", errors, (), 20.0),), judge)


def errors() -> Figures:
    """Compute mean relative errors on the validation set."""
    fitted_on, fitted_q = _samples(_FIT_SEED)
    seen, measured = _samples(_VALIDATION_SEED)
    model = QoeModel.fit(fitted_on, fitted_q)
    mean = np.full(len(measured), fitted_q.mean())
    # Weighting each request by 1/latency reduces the error that unweighted least squares leave.
    weighted = QoeModel.fit(fitted_on / fitted_q[:, None], np.ones(len(fitted_q)))
    return {
        "model": mean_relative_error(model.requests(seen), measured),
        "global_mean": mean_relative_error(mean, measured),
        "weighted_model": mean_relative_error(weighted.requests(seen), measured),
        "samples": float(len(measured)),
        "coefficients": list(model.d),
    }


def judge(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Judge C9: the model must be about as good as the paper's, and the mean about as bad."""
    ours = figures[f"{_NAME}/all"]
    model, mean = number(ours, "model"), number(ours, "global_mean")
    verdict = weakest([judge_bound(model, 0.089, mean), judge_effect(mean - model, 0.64 - 0.089)])
    return (
        Finding(
            C9.claim_id,
            f"{model:.1%}; {mean:.0%}",
            verdict,
            "unweighted least squares fit the slowest batches best; weighted by 1/latency the error of the "
            f"same model is {number(ours, 'weighted_model'):.1%}",
            ours,
        ),
    )


def _samples(seed: int) -> tuple[Floats, Floats]:
    """Return ([n, 5] features seen by each request on average, [n] normalized latencies)."""
    features: list[Floats] = []
    latencies: list[Floats] = []
    for batch, requests in _configurations(seed):
        spec = ClusterSpec.uniform(
            1, llama_on_h20(), max_num_seqs=batch, penalty=load_length_penalty(FIGURE_2)
        )
        records = simulate(spec, requests, LeastLoaded(), Fcfs()).requests
        seen, latency = observed(records)
        features.append(seen)
        latencies.append(latency)
    return np.concatenate(features), np.concatenate(latencies)


def _configurations(seed: int) -> Iterator[tuple[int, list[SimRequest]]]:
    drawn = GENERATORS["sharegpt"].requests(_DRAWN, 1.0, seed)
    for bucket in range(_BUCKETS):
        low = _SHORTEST * 2**bucket
        inside = [r for r in drawn if low <= r.prompt_tokens + r.output_tokens < 2 * low]
        for batch in _BATCHES:
            wanted = max(4, round(_ROUNDS * batch))
            some = [inside[n % len(inside)] for n in range(wanted)] if inside else []
            if some:
                yield (
                    batch,
                    [
                        SimRequest(str(n), 0.0, r.prompt_tokens, 0, r.answer_tokens)
                        for n, r in enumerate(some)
                    ],
                )


def observed(records: Sequence[RequestRecord]) -> tuple[Floats, Floats]:
    """Return F_0 to F_4 of Eq. (1) averaged over each request's time in the engine, and its normalized
    latency."""
    rows = [
        (r.arrival_s + r.queue_s, r.first_token_s, r.finish_s, r.prompt_tokens, r.output_tokens)
        for r in records
        if r.queue_s is not None and r.first_token_s is not None and r.finish_s is not None
    ]
    start, first, finish, prompt, output = np.array(rows, dtype=np.float64).T
    moments = np.linspace(start.min(), finish.max(), _MOMENTS)
    # [requests, moments]
    alive = (start[:, None] <= moments) & (moments < finish[:, None])
    done = (moments - first[:, None]) / np.maximum(finish - first, 1e-9)[:, None]
    length = prompt[:, None] + output[:, None] * np.clip(done, 0.0, 1.0)
    total = np.stack(
        [
            np.ones(_MOMENTS),
            alive.sum(axis=0),
            (alive * prompt[:, None]).sum(axis=0),
            (alive * prompt[:, None] ** 2).sum(axis=0),
            (alive * length).sum(axis=0),
        ],
        axis=1,
    )
    weight = alive / np.maximum(1, alive.sum(axis=1))[:, None]
    seen = weight @ total
    kept = alive.any(axis=1)
    assert seen.shape[1] == FEATURES
    return seen[kept], ((finish - start) / output)[kept]
