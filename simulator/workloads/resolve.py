"""A workload from what a user types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simulator.workloads import azure, burstgpt, jsonl, mooncake
from simulator.workloads.arrivals import at_rate, merged, scaled
from simulator.workloads.base import Clip, Workload, WorkloadError
from simulator.workloads.fit import fit
from simulator.workloads.generators import GENERATORS, SESSIONS, Generator, SessionGenerator

# Loaders by the word before the colon.
FORMATS: Mapping[str, Callable[[Path, Clip], Workload]] = {
    "azure": azure.load,
    "burstgpt": burstgpt.load,
    "jsonl": jsonl.load,
    "mooncake": mooncake.load,
}
# Requests of a generator when neither a count nor a duration is asked for.
DEFAULT_COUNT = 1_000


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What a user may ask of a workload; times in seconds, rates in requests a second."""

    # Of generators; traces have nothing random.
    seed: int = 0
    # A generator's mean rate (it must have one); a trace is scaled in time until its mean rate is this.
    rate_per_s: float | None = None
    # A trace's time runs this many times as fast; not together with rate_per_s.
    speed: float | None = None
    # At most so many requests; of a generator exactly so many.
    count: int | None = None
    # A window of the workload's own time, before scaling.
    start_s: float = 0.0
    duration_s: float | None = None
    # Prompts are cut so that prompt and output fit into so many tokens; None: left as they are.
    max_model_len: int | None = None

    @property
    def clip(self) -> Clip:
        """The part of the workload that is asked for. Raises WorkloadError if there can be none."""
        return Clip(self.start_s, self.duration_s, self.count)


def resolve_workload(spec: str, options: WorkloadOptions) -> Workload:
    """The workload that `spec` names: a generator, `format:path`, or several of them with commas between.

    Of several, each gives an equal share of the count and of the rate, and they run side by side. Raises
    WorkloadError for what does not exist, cannot be read, or is asked for in a way that makes no sense.
    """
    parts = [part.strip() for part in spec.split(",")]
    if len(parts) == 1:
        workload = _one(spec.strip(), options)
    else:
        shared = [_one(part, _share(options, place, len(parts))) for place, part in enumerate(parts)]
        workload = merged(",".join(part.name for part in shared), shared)
    if options.max_model_len is not None:
        workload = fit(workload, options.max_model_len).workload
    return workload


def _share(options: WorkloadOptions, place: int, parts: int) -> WorkloadOptions:
    """The options of one of several parts: its share of count and rate, and a seed of its own."""
    count = options.count
    if count is not None:
        count = count // parts + (place < count % parts)
    rate = None if options.rate_per_s is None else options.rate_per_s / parts
    seed = int(np.random.SeedSequence([options.seed, place]).generate_state(1)[0])
    return replace(options, count=count, rate_per_s=rate, seed=seed)


def _one(spec: str, options: WorkloadOptions) -> Workload:
    if spec in GENERATORS:
        return _generated(GENERATORS[spec], options)
    if spec in SESSIONS:
        return _generated(SESSIONS[spec], options)
    form, colon, path = spec.partition(":")
    if form in FORMATS and path:
        return _timed(FORMATS[form](Path(path).expanduser(), options.clip), options)
    problem = f"unknown format {form!r}" if colon else f"unknown workload {spec!r}"
    raise WorkloadError(
        f"{problem}; generators: {', '.join([*GENERATORS, *SESSIONS])}; files: "
        + ", ".join(f"{name}:PATH" for name in FORMATS)
    )


def _timed(trace: Workload, options: WorkloadOptions) -> Workload:
    if options.rate_per_s is not None and options.speed is not None:
        raise WorkloadError("a trace is scaled either to a rate or by a speed, not both")
    if options.rate_per_s is not None:
        return at_rate(trace, options.rate_per_s)
    return trace if options.speed is None else scaled(trace, options.speed)


def _generated(generator: Generator | SessionGenerator, options: WorkloadOptions) -> Workload:
    rate = options.rate_per_s
    if rate is None:
        raise WorkloadError(f"{generator.name} is generated and needs a rate")
    if options.speed is not None or options.start_s:
        raise WorkloadError(f"{generator.name} is generated: it has a rate, not a speed or a start")
    if not (rate > 0.0 and math.isfinite(rate)):
        raise WorkloadError(f"the rate must be a number above zero, not {rate}")
    clip = options.clip
    count = DEFAULT_COUNT if clip.count is None else clip.count
    if clip.duration_s is not None and clip.count is None:
        # Eight standard deviations above the mean: that so many arrive before the window ends never happens.
        mean = rate * clip.duration_s
        spread = math.sqrt(mean) * max(1.0, generator.arrival_cv)
        count = math.ceil(mean + 8.0 * spread) + 8
    requests = clip.cut(generator.requests(count, rate, options.seed))
    if not requests:
        raise WorkloadError(f"{generator.name}: nothing arrives{clip.words()} at {rate:g} requests/s")
    arriving = f"{generator.arrivals}, {rate:g}/s, seed {options.seed}"
    source = f"{generator.summary}; {len(requests)} requests, {arriving}"
    return Workload(generator.name, requests, source)
