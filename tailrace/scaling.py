"""How many instances of a model its load needs to be served within the SLOs.

It is computed from what placements are decided on: the views of the instances, their measured step times, and
the lengths of recent requests.

An instance that gets x requests per second spends x * w of each second on their work w: their prefill, and
their share of the decode steps that they are in. What is left of the second is for the part b of a step that
every step takes, whatever is in the batch. So a step takes b / (1 - x * w), and by Little's law
x * output tokens times that many requests run. The capacity of an instance is the largest x for which a step
is within the TPOT SLO, a mean prompt within the TTFT SLO, and what runs fits the batch and the KV cache.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

from tailrace.cluster import InstanceState, InstanceView
from tailrace.lengths import PARTS, LengthStatistics
from tailrace.numeric import Duration, RealRange, WholeRange
from tailrace.perf.steps import StepModel, StepTimes
from tailrace.service.settings import setting
from tailrace.slo import Slo

# Of an SLO, what is at least left for the load. An instance that misses an SLO when idle would otherwise have
# no capacity, although no number of instances would help.
_LEAST_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the desired number of instances follows the load; times in seconds."""

    utilization: float = setting(
        0.7,
        "Share of an instance's capacity within the SLOs that the desired number of instances uses.",
        "--desired-utilization",
        rare=True,
        type=RealRange(min=0.01, max=1),
        metavar="SHARE",
    )
    least: int = setting(
        1,
        "Least desired instances of a model; 0: none while it has no requests (front ends then need "
        "--instance-wait).",
        "--desired-min",
        type=WholeRange(min=0),
    )
    most: int = setting(1_000, "Most desired instances of a model.", "--desired-max", type=WholeRange(min=1))
    window_s: float = setting(
        60.0,
        "Period over which the rate and the lengths of requests are measured.",
        "--desired-window",
        rare=True,
        type=Duration(min=1, max=86_400),
        metavar="SECONDS",
    )
    catch_up_s: float = setting(
        30.0,
        "Time within which the desired instances would work off what waits.",
        "--desired-catch-up",
        rare=True,
        type=Duration(min=1, max=86_400),
        metavar="SECONDS",
    )
    up_delay_s: float = setting(
        10.0,
        "How long the load must need more instances before more are desired.",
        "--desired-up-delay",
        rare=True,
        type=Duration(min=0, max=86_400),
        metavar="SECONDS",
    )
    cooldown_s: float = setting(
        300.0,
        "How long the load must need fewer instances before fewer are desired.",
        "--desired-cooldown",
        rare=True,
        type=Duration(min=0, max=86_400),
        metavar="SECONDS",
    )


DEFAULT_SCALING: Final = Scaling()


class Need(NamedTuple):
    """What the load of one model needs now, in instances."""

    # To serve it within the SLOs at the target utilization; a fraction.
    serving: float
    # To hold the KV of the requests that are running, whichever instances these are; at least one while there
    # are requests, also those that wait for an instance.
    holding: int


class _Load(NamedTuple):
    """The arrivals of a model, and means over its requests, in tokens."""

    rate_per_s: float
    prompt: float
    prompt_squared: float
    output: float
    # Of a request while it decodes.
    context: float

    def prefill_s(self, steps: StepTimes[float]) -> float:
        """Return the work of a prompt, in seconds of an instance."""
        return steps.per_token_s * self.prompt + steps.per_token_squared_s * self.prompt_squared

    def decoding_s(self, steps: StepTimes[float]) -> float:
        """Return by how much a request lengthens the decode steps that it is in, all together."""
        return self.output * (steps.per_request_s + steps.per_kv_token_s * self.context)


def need(
    instances: Collection[InstanceView],
    lengths: LengthStatistics,
    slo: Slo,
    scaling: Scaling,
    nominal: StepModel,
) -> Need:
    """Return what the load on these instances, all those of one model, needs.

    `lengths`: arrived prompts, without what a prefix cache held of them, and finished requests, of the last
    `scaling.window_s` seconds. `nominal`: the step times of instances that have not been measured
    (`tailrace profile`), in proportion; how fast these are is told from the time between their tokens. Of
    unequal instances, as many are needed as of their mean.
    """
    serving = [i for i in instances if i.state is InstanceState.ACTIVE] or list(instances)
    if not serving:
        return Need(0.0, 0)
    load = _load(lengths, scaling)
    prefilling = load.rate_per_s / len(serving) * load.prefill_s(nominal)
    steps = _mean_steps(_steps_of(instance, nominal, prefilling) for instance in serving)
    base_s = max(steps.prefill_base_s, steps.decode_base_s)
    capacity_per_s = scaling.utilization * _capacity_per_s(serving, load, steps, base_s, slo)
    arriving = _ratio(load.rate_per_s, capacity_per_s)
    running = 0.0
    if slo.tpot_s is not None:
        # What runs now, in seconds of a step, besides the prefill of what arrives during one.
        batch_s = math.fsum(
            steps.per_request_s * i.running + steps.per_kv_token_s * _held_tokens(i) for i in instances
        )
        spare_s = slo.tpot_s * _share_left(base_s, slo.tpot_s)
        prefills_s = load.rate_per_s * load.prefill_s(steps) * slo.tpot_s
        running = (batch_s + prefills_s) / (spare_s * scaling.utilization)
    waiting_s = math.fsum(
        steps.backlog_s(float(max(0, i.prefill_backlog_tokens)), float(max(1, i.waiting)))
        + i.waiting * load.decoding_s(steps)
        for i in instances
    )
    holding = max(_holding(instances, serving), any(i.running or i.waiting for i in instances))
    return Need(max(arriving, running) + waiting_s / scaling.catch_up_s, holding)


def _load(lengths: LengthStatistics, scaling: Scaling) -> _Load:
    prompts, weights = lengths.arrived()
    arrived = float(weights.sum())
    prompt = squared = output = context = 0.0
    if arrived > 0.0:
        prompt = float((weights * prompts).sum()) / arrived
        squared = float((weights * prompts * prompts).sum()) / arrived
    done_prompts, outputs, done_weights = lengths.finished()
    made = outputs * done_weights
    if (total := float(made.sum())) > 0.0:
        output = total / float(done_weights.sum())
        context = float((made * (done_prompts + outputs / 2.0)).sum()) / total
    return _Load(arrived / max(lengths.seconds, scaling.window_s / PARTS), prompt, squared, output, context)


def _steps_of(
    instance: InstanceView, nominal: StepModel, prefilling: float
) -> tuple[StepTimes[float], float]:
    """Return the step times of an instance, and how many times as long its steps take: its own as measured,
    else the nominal ones and what a step takes longer than they say.

    `prefilling`: the share of its time that prefills would take by them. A step has at most one chunk.
    """
    if instance.measured is not None:
        return instance.measured.steps, 1.0
    if instance.token_interval_s <= 0.0:
        return nominal, 1.0
    decode_s = nominal.decode_s(instance.running, _held_tokens(instance))
    chunk_s = min(instance.token_interval_s * prefilling, nominal.compute_s(nominal.chunk_tokens))
    return nominal, instance.token_interval_s / (decode_s + chunk_s)


def _capacity_per_s(
    serving: Collection[InstanceView],
    load: _Load,
    steps: StepTimes[float],
    base_s: float,
    slo: Slo,
) -> float:
    """Return the requests per second that a mean instance serves within the SLOs; infinite: any number."""
    prefill_s = load.prefill_s(steps)
    work_s = prefill_s + load.decoding_s(steps)
    shares = [1.0]
    if slo.tpot_s is not None:
        shares.append(_share_left(base_s, slo.tpot_s))
    if slo.ttft_s is not None:
        shares.append(_share_left(base_s + prefill_s, slo.ttft_s))
    # What a request occupies during its steps, and how much of it an instance has; 0: unknown.
    room = (
        (load.output * load.context, _mean(i.kv_capacity_tokens for i in serving)),
        (load.output, _mean(i.max_num_seqs for i in serving)),
        (load.prompt, steps.chunk_tokens),
    )
    fits = [_ratio(has, occupied * base_s + has * work_s) for occupied, has in room if has > 0.0]
    return min([_ratio(min(shares), work_s), *fits])


def _share_left(taken_s: float, slo_s: float) -> float:
    """Return the share of an SLO that is left for the load if an idle instance takes `taken_s` of it."""
    return max(1.0 - taken_s / slo_s, _LEAST_SHARE)


def _held_tokens(instance: InstanceView) -> int:
    """Return the KV in use, without what is reserved for requests that are still held elsewhere."""
    return max(0, instance.kv_used_tokens - instance.coming_tokens)


def _holding(instances: Iterable[InstanceView], serving: Iterable[InstanceView]) -> int:
    """Return how many of the serving instances hold what all hold, even if the smallest ones remain."""
    held = sum(_held_tokens(i) for i in instances)
    capacities = sorted(i.kv_capacity_tokens for i in serving if i.kv_capacity_tokens > 0)
    count = 0
    while held > 0 and count < len(capacities):
        held -= capacities[count]
        count += 1
    return count if held <= 0 or not capacities else count + math.ceil(held / capacities[0])


def _mean_steps(steps: Iterable[tuple[StepTimes[float], float]]) -> StepTimes[float]:
    """Return the mean of step times, each as many times as long as it says.

    A thousand instances share a few step times, so their factors are added first: placements wait meanwhile.
    """
    shared: dict[int, tuple[StepTimes[float], list[float]]] = {}
    for each, longer in steps:
        shared.setdefault(id(each), (each, []))[1].append(longer)
    weights = [(each, math.fsum(factors), len(factors)) for each, factors in shared.values()]
    count = sum(number for _, _, number in weights)
    times = {
        field.name: math.fsum(getattr(each, field.name) * weight for each, weight, _ in weights) / count
        for field in fields(StepTimes)
    }
    chunk_tokens = math.fsum(each.chunk_tokens * number for each, _, number in weights) / count
    return StepTimes(**{**times, "chunk_tokens": chunk_tokens})


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def _ratio(of: float, to: float) -> float:
    return of / to if to > 0.0 else (math.inf if of > 0.0 else 0.0)


class DesiredInstances:
    """The desired number of instances of one model, which follows its need.

    It grows to what all samples of `up_delay_s` needed, and shrinks to what none of `cooldown_s` exceeded.
    What running requests hold counts at once, and so does that requests wait for a first instance. Before the
    first cool-down, all instances that there are count, so that a restart of who computes this removes none.
    """

    def __init__(self, scaling: Scaling, now_s: float) -> None:
        self._scaling = scaling
        self._began_s = now_s
        # Time and need of the samples that still count, oldest first.
        self._samples: deque[tuple[float, int]] = deque()
        self.count = scaling.least

    def update(self, needed: Need, present: int, now_s: float) -> int:
        """Add a sample, and return the desired number. `present`: the instances that there are; `now_s` never
        decreases."""
        scaling = self._scaling
        holding = self._bounded(needed.holding)
        if now_s - self._began_s < scaling.cooldown_s:
            holding = max(holding, self._bounded(present))
        # Rounding must not cost an instance.
        asked = max(self._bounded(needed.holding), self._bounded(needed.serving - 1e-9))
        self._samples.append((now_s, asked))
        while self._samples[0][0] < now_s - max(scaling.up_delay_s, scaling.cooldown_s):
            self._samples.popleft()
        if (least := self._over(scaling.up_delay_s, now_s, min)) is not None and least > self.count:
            self.count = least
        if (most := self._over(scaling.cooldown_s, now_s, max)) is not None and most < self.count:
            self.count = most
        self.count = max(self.count, holding)
        return self.count

    def _over(self, period_s: float, now_s: float, of: Callable[[Iterable[int]], int]) -> int | None:
        """Return the least or most that the last `period_s` seconds asked for; None: it has not lasted so
        long."""
        if now_s - self._began_s < period_s:
            return None
        return of(asked for at_s, asked in self._samples if at_s >= now_s - period_s)

    def _bounded(self, count: float) -> int:
        most = self._scaling.most
        return most if count >= most else max(self._scaling.least, math.ceil(count))
