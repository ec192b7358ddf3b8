"""Fit a profile: step model, Arrow's TTFT curve and Max Running Tokens, CascadeInfer's QoE model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tailrace import __version__
from tailrace.perf.fit import fit_costs
from tailrace.perf.qoe_model import QoeModel, mean_relative_error
from tailrace.perf.steps import max_running_tokens
from tailrace.perf.ttft import TtftPredictor
from tailrace.profiles import DecodeModel, PrefillModel, Profile
from tailrace.records import ProfileRecord, QoeRecord, TtftRecord, profile_kind
from worker_agent.engine.base import EngineInfo
from worker_agent.profiling.measure import Samples
from worker_agent.profiling.probes import ProbeResult
from worker_agent.speeds import CONTEXT_TOKENS

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """A fit. `coefficients`: one per column; `error`: mean |predicted - measured| / measured."""

    coefficients: tuple[float, ...]
    error: float
    samples: int


def fit_times(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Fit the costs of `rows`, shape [samples, columns], to `seconds` (fit_costs). Raise ValueError for fewer
    samples of positive time than columns."""
    matrix, times = np.array(rows, dtype=np.float64), np.array(seconds, dtype=np.float64)
    if not len(times):
        raise ValueError("there are no samples")
    if matrix.ndim != 2 or len(matrix) != len(times):
        raise ValueError(f"{len(times)} times do not go with rows of shape {matrix.shape}")
    matrix, times = matrix[times > 0.0], times[times > 0.0]
    if len(times) < matrix.shape[1]:
        raise ValueError(f"{len(times)} samples are too few for {matrix.shape[1]} coefficients")
    coefficients = fit_costs(matrix, times)
    error = float(np.abs(matrix @ coefficients / times - 1.0).mean())
    return Fit(tuple(float(value) for value in coefficients), error, len(times))


def r_squared(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return the coefficient of determination: the share of the variance that the prediction explains."""
    estimates, truth = np.array(predicted), np.array(measured)
    spread = float(((truth - truth.mean()) ** 2).sum())
    residual = float(((truth - estimates) ** 2).sum())
    return 1.0 - residual / spread if spread > 0.0 else float(residual == 0.0)


# Weight of a prefill in CascadeInfer's section 4.1, as in QoeModel.of_profile; that of an iteration is 1.
_ALPHA: Final = 1 / 256
# Minimum number of samples for the five coefficients.
_QOE_SAMPLES: Final = 25


class TooFewSamples(Exception):
    """The budget was too small for the samples needed; the message says for which."""


def profile_of(
    info: EngineInfo, instance_id: str, samples: Samples, tpot_s: float, took_s: float
) -> ProfileRecord:
    """Return the record for etcd. `tpot_s`: TPOT SLO for Max Running Tokens. Raise TooFewSamples."""
    try:
        prefill = fit_times(
            [(-(-tokens // info.step_tokens), tokens, tokens**2) for tokens, _ in samples.ttft],
            [seconds for _, seconds in samples.ttft],
        )
        decode = fit_times(
            [(1.0, sample.requests, sample.kv_tokens) for sample in samples.decode],
            [sample.seconds for sample in samples.decode],
        )
    except ValueError as error:
        raise TooFewSamples(str(error)) from error
    kind = kind_of(info)
    capacity = info.kv_blocks_total * info.kv_shape.block_tokens
    source = f"measured on {instance_id} by tailrace profile"
    # Medians show how times grow with the batch, without stalls. But TPOT and queueing delays are sums of
    # steps, for which the mean matters, so the coefficients are scaled by the ratio of mean to median.
    stalled = 1e3 * fmean(samples.ttft_stalls)
    p_base, p_token, p_squared = (stalled * value for value in prefill.coefficients)
    stalled = 1e3 * fmean(samples.decode_stalls)
    d_base, d_request, d_token = (stalled * value for value in decode.coefficients)
    profile = Profile(
        name=kind,
        model=info.model,
        gpu=info.hardware,
        prefill=PrefillModel(base_ms=p_base, ms_per_token=p_token, ms_per_token_squared=p_squared),
        decode=DecodeModel(base_ms=d_base, ms_per_request=d_request, ms_per_kv_token=d_token),
        kv_bytes_per_token=info.kv_shape.block_bytes // info.kv_shape.block_tokens,
        kv_capacity_tokens=capacity,
        sources={"prefill": source, "decode": source},
    )
    return ProfileRecord(
        kind=kind,
        engine=info.engine,
        model=info.model,
        model_fingerprint=info.kv_shape.model_fingerprint,
        hardware=info.hardware,
        step_tokens=info.step_tokens,
        version=__version__,
        instance_id=instance_id,
        measured_s=time.time(),
        took_s=took_s,
        profile=profile,
        prefill_error=prefill.error,
        prefill_samples=prefill.samples,
        decode_error=decode.error,
        decode_samples=decode.samples,
        ttft=_curve(samples.ttft),
        tpot_s=tpot_s,
        max_running_tokens=min(capacity, max_running_tokens(profile, tpot_s, CONTEXT_TOKENS)),
        qoe=_qoe(samples.results),
    )


def kind_of(info: EngineInfo) -> str:
    """Return the profile kind, which equal instances have in common."""
    fingerprint = info.kv_shape.model_fingerprint
    return profile_kind(info.engine, info.model, fingerprint, info.hardware, info.step_tokens)


def _curve(samples: list[tuple[int, float]]) -> TtftRecord:
    predictor = TtftPredictor.fit(samples)
    predicted = [predictor.prefill_s(tokens) for tokens, _ in samples]
    return TtftRecord(
        base_s=predictor.base_s,
        per_token_s=predictor.per_token_s,
        per_token_squared_s=predictor.per_token_squared_s,
        r_squared=r_squared(predicted, [seconds for _, seconds in samples]),
        samples=len(samples),
    )


def _qoe(results: list[ProbeResult]) -> QoeRecord | None:
    """Fit the QoE model by section 4.1's least squares; return None with too few samples.

    A negative coefficient is noise, and would make the planner assume that load improves latency: it is set
    to 0, and the others are fitted again.
    """
    if len(results) < _QOE_SAMPLES:
        return None
    batches = np.array([result.features for result in results])
    latencies = np.array([_ALPHA * result.ttft_s + result.tpot_s for result in results])
    mask = np.ones(batches.shape[1])
    while mask.any():
        fitted = QoeModel.fit(batches * mask, latencies)
        # An excluded coefficient is 0 except for rounding errors, which may be negative.
        d0, d1, d2, d3, d4 = (float(value) for value in np.where(mask > 0.0, fitted.d, 0.0))
        model = QoeModel((d0, d1, d2, d3, d4))
        worst = int(np.argmin(model.d))
        if model.d[worst] >= 0.0:
            error = mean_relative_error(model.requests(batches), latencies)
            return QoeRecord(d=model.d, error=error, samples=len(results))
        mask[worst] = 0.0
    return None
