"""Create a workload from a user's specification."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simulator.workloads import jsonl
from simulator.workloads.arrivals import at_rate, fit, merged, scaled, shuffled
from simulator.workloads.base import Clip, Workload, WorkloadError
from simulator.workloads.generators import GENERATORS, SESSIONS, Generator, SessionGenerator
from simulator.workloads.rows import SPAN_MAX_S
from simulator.workloads.traces import load_azure, load_burstgpt, load_mooncake
from tailrace.numeric import RealRange, WholeRange
from tailrace.service.settings import setting
from tailrace.suggestion import did_you_mean

# Loaders by the word before the colon.
FORMATS: Mapping[str, Callable[[Path, Clip], Workload]] = {
    "azure": load_azure,
    "burstgpt": load_burstgpt,
    "jsonl": jsonl.load,
    "mooncake": load_mooncake,
}
# Requests of a generator if neither a count nor a duration is given.
DEFAULT_COUNT = 1_000
COUNT_MAX = 10_000_000


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Options of a workload; times are in seconds, rates in requests per second."""

    # Seed of generators; traces have no randomness.
    seed: int = 0
    # Mean rate: required for generators; a trace is scaled in time to reach it.
    rate_per_s: float | None = None
    # Excludes rate_per_s.
    speed: float | None = setting(
        None, "Factor by which a trace is sped up.", type=RealRange(min=0.0, min_open=True), rare=True
    )
    # For generators the exact number.
    count: int | None = setting(
        None, "Requests. [default: all; generated: 1000]", type=WholeRange(1, COUNT_MAX)
    )
    # A window in the workload's own time, before scaling.
    start_s: float = setting(
        0.0,
        "Seconds of a trace to skip.",
        "--start",
        type=RealRange(min=0.0),
        show_default=False,
        rare=True,
    )
    duration_s: float | None = setting(
        None,
        "Seconds of the workload's own time.",
        "--duration",
        type=RealRange(min=0.0, min_open=True),
        rare=True,
    )
    max_model_len: int | None = setting(
        None,
        "Truncate prompts so that prompt and output fit into this many tokens.",
        type=WholeRange(min=2),
        rare=True,
    )
    # Whether a trace, which has no randomness, gets some: seeds other than 0 pair its arrivals and lengths
    # anew.
    shuffle: bool = False

    @property
    def clip(self) -> Clip:
        """Return the selected section of the workload. Raise WorkloadError if it is always empty."""
        return Clip(self.start_s, self.duration_s, self.count)


def resolve_workload(spec: str, options: WorkloadOptions) -> Workload:
    """Create the workload that `spec` names: a generator, `format:path`, or several of them separated by
    commas.

    Several parts run side by side, each with an equal share of the count and the rate. Raise WorkloadError
    for a workload that does not exist or cannot be read, and for options that contradict it.
    """
    parts = [part.strip() for part in spec.split(",")]
    if len(parts) == 1:
        workload = _resolve_part(spec.strip(), options)
    else:
        if options.count is not None and options.count < len(parts):
            raise WorkloadError(f"--count is {options.count}: {len(parts)} workloads need at least as many")
        shared = [_resolve_part(part, _share(options, index, len(parts))) for index, part in enumerate(parts)]
        workload = merged(",".join(part.name for part in shared), shared)
    if options.max_model_len is not None:
        workload = fit(workload, options.max_model_len)
    if (last_s := workload.requests[-1].arrival_s) > SPAN_MAX_S:
        raise WorkloadError(
            f"the last request would arrive after {last_s:.3g} s; at most {SPAN_MAX_S:.0e} s can be simulated"
        )
    return workload


def _share(options: WorkloadOptions, index: int, total: int) -> WorkloadOptions:
    """Return the options of one of several parts: its share of count and rate, and its own seed."""
    count = options.count
    if count is not None:
        count = count // total + (index < count % total)
    rate = None if options.rate_per_s is None else options.rate_per_s / total
    seed = int(np.random.SeedSequence([options.seed, index]).generate_state(1)[0])
    return replace(options, count=count, rate_per_s=rate, seed=seed)


def _resolve_part(spec: str, options: WorkloadOptions) -> Workload:
    if spec in GENERATORS:
        return _generate(GENERATORS[spec], options)
    if spec in SESSIONS:
        return _generate(SESSIONS[spec], options)
    form, colon, path = spec.partition(":")
    if form in FORMATS and colon:
        if not path:
            raise WorkloadError(f"{spec!r} names no file: give {form}:PATH")
        trace = _scaled(FORMATS[form](Path(path).expanduser(), options.clip), options)
        return shuffled(trace, options.seed) if options.shuffle and options.seed else trace
    problem = f"unknown format {form!r}" if colon else f"unknown workload {spec!r}"
    if not colon and Path(spec).expanduser().is_file():
        raise WorkloadError(
            f"{spec!r} is a file: put its format before it, as in jsonl:{spec}; formats: {', '.join(FORMATS)}"
        )
    meant = did_you_mean(form if colon else spec, FORMATS if colon else [*GENERATORS, *SESSIONS])
    raise WorkloadError(
        f"{problem}{meant}; generators: {', '.join([*GENERATORS, *SESSIONS])}; files: "
        + ", ".join(f"{name}:PATH" for name in FORMATS)
    )


def _scaled(trace: Workload, options: WorkloadOptions) -> Workload:
    if options.rate_per_s is not None and options.speed is not None:
        raise WorkloadError("a trace is scaled either to a rate or by a speed, not both")
    if options.rate_per_s is not None:
        return at_rate(trace, options.rate_per_s)
    return trace if options.speed is None else scaled(trace, options.speed)


def _generate(generator: Generator | SessionGenerator, options: WorkloadOptions) -> Workload:
    rate = options.rate_per_s
    if rate is None:
        raise WorkloadError(f"{generator.name} is generated and needs a rate: --rate N, requests per second")
    if options.speed is not None or options.start_s:
        raise WorkloadError(f"{generator.name} is generated: it has a rate, not a speed or a start")
    if not (rate > 0.0 and math.isfinite(rate)):
        raise WorkloadError(f"the rate must be a number above zero, not {rate}")
    clip = options.clip
    count = DEFAULT_COUNT if clip.count is None else clip.count
    if clip.duration_s is not None and clip.count is None:
        # Eight standard deviations above the mean: enough to cover the window.
        mean = rate * clip.duration_s
        spread = math.sqrt(mean) * max(1.0, generator.arrival_cv)
        expected = mean + 8.0 * spread
        if not expected < COUNT_MAX:
            raise WorkloadError(
                f"{expected:.3g} requests would arrive in {clip.duration_s:g} s; at most {COUNT_MAX} can"
            )
        count = math.ceil(expected) + 8
    requests = clip.cut(generator.requests(count, rate, options.seed))
    if not requests:
        raise WorkloadError(f"{generator.name}: nothing arrives{clip.describe()} at {rate:g} requests/s")
    arriving = f"{generator.arrivals}, {rate:g}/s, seed {options.seed}"
    source = f"{generator.summary}; {len(requests)} requests, {arriving}"
    return Workload(generator.name, requests, source)
