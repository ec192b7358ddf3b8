"""The cost model, by column: the predicted seconds that a request costs all requests concerned.

While an instance decodes B requests, each second counts B times, since B requests wait for their next token.
A decode step therefore costs B * step(B, K), where K is the number of KV tokens. A request that joins for R
steps costs R times the increase of that: its own steps, and the slowdown of the others' steps. Added to it
are the wait for the request's first token, its prefill, during which the others wait, and, if KV is short,
the wait until enough KV is free.

Between two placements, few of a thousand instances have reported, so what depends on an instance alone is
kept in columns (`Offers`) and computed again only for those. A column depends on nothing but the instance's
view and the step times of all, so that it affects no decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Generic, NamedTuple

import numpy as np

from tailrace.cluster import Arrival, CachedTokens, ClusterView, InstanceState, InstanceView
from tailrace.intra.earliest_due import PREFILLS, nominal_s
from tailrace.perf.steps import Floats, Number, StepModel, StepTimes, held_tokens
from tailrace.policy.columns import SeenInstances
from tailrace.policy.requests import table_of
from tailrace.policy.tailrace.queue import QueueColumns


@dataclass(frozen=True, slots=True)
class Costs:
    """The parameters of the cost model.

    - `nominal`: step times of instances that have not been measured.
    - `tpot_slo_s`: the SLO against which decode steps of answering requests are weighted.
    - `expected_tokens`: expected output of an arrival. 256 is near the mean of ShareGPT's answers, as in
      CascadeInfer's QoE model here.
    - `patience_s`: a wait for the first token counts double once it reaches this time plus the longest that
      the prompt yields to others inside an instance (`tailrace.intra.earliest_due`). Half a second, for very
      short prompts, is half of what a person notices as an interruption (Nielsen's one second).
    - `open_s`, `link_bytes_per_s`: time to open and commit a migration, and assumed bandwidth of its copy
      (100 Gbit/s).
    """

    nominal: StepModel
    tpot_slo_s: float
    expected_tokens: float = 256.0
    patience_s: float = 0.5
    open_s: float = 0.01
    link_bytes_per_s: float = 12.5e9

    def steps_of(self, instance: InstanceView) -> StepModel:
        """Return the instance's measured step times, else the nominal ones."""
        measured = instance.measured
        return self.nominal if measured is None else measured.steps

    def transfer_s(self, source: InstanceView, tokens: Number) -> Number:
        """Return the seconds to transfer `tokens` of KV from `source`."""
        return tokens * self.steps_of(source).kv_bytes_per_token / self.link_bytes_per_s + self.open_s

    def usable_tokens(self, instance: InstanceView, held: CachedTokens) -> int:
        """Return the cached tokens of an arrival on an instance, as equivalent tokens on its device."""
        return held_tokens(self.steps_of(instance), held.device, held.total)


class Reported(NamedTuple):
    """What a view says of an instance: numbers of requests, and tokens."""

    # 0, or infinite for one that gets no arrivals.
    barred: float
    running: float
    waiting: float
    used: float
    # KV in host memory of requests that were preempted.
    swapped: float
    backlog: float
    capacity: float
    context: float
    reasoning: float
    # Prompts that the view lists, and their tokens.
    prompts: float
    prompt_tokens: float


_COEFFICIENTS: Final = tuple(map(attrgetter, StepTimes.__dataclass_fields__))


class Offer(NamedTuple, Generic[Number]):
    """What each instance offers to any request, whatever its length."""

    # 0, or infinite for one that gets no arrivals.
    barred: Number
    # Requests running or waiting, and the tokens that they hold or need.
    requests: Number
    held: Number
    swapped: Number
    # Free KV tokens after that; negative: KV is short. Seconds until one token is freed: a request is assumed
    # to free its context in `expected_tokens` steps.
    free: Number
    free_token_s: Number
    # Weight of a second of delay for a decoding request, from 0 to 1.
    weight: Number
    # Seconds until a prompt would start if no listed prompt were ahead of it: the step in progress and the
    # unlisted backlog. Decode time in the steps that compute a prompt token.
    start_s: Number
    step_token_s: Number
    # Tokens of a mean request.
    mean_tokens: Number
    # Increase of the batch's step cost by a request; less what an answer is spared; per token of its context.
    joining_s: Number
    arriving_s: Number
    joining_token_s: Number


def offer_of(costs: Costs, reported: Reported, steps: StepModel, shortest_s: float) -> Offer[float]:
    """Compute what an instance with these step times offers. `shortest_s`: shortest idle step of all."""
    running, used = reported.running, reported.used
    requests, held = running + reported.waiting, used + reported.backlog
    step_s = steps.decode_s(running, used)
    step_token_s = step_s / steps.chunk_tokens
    # A reasoning request counts fully, because its user waits for the first token. An answering one counts by
    # the square of the step's share of the TPOT SLO: little while the answer is well within it. What the idle
    # step of a slow kind takes beyond the shortest one delays no answer as long as it is within the SLO.
    decoding = max(1.0, requests - reported.prompts)
    reasoning = min(1.0, max(0.0, reported.reasoning - reported.prompts) / decoding)
    kind_s = steps.decode_base_s - shortest_s if steps.decode_base_s < costs.tpot_slo_s else 0.0
    slo_share = min(1.0, (step_s - kind_s) / (costs.tpot_slo_s - kind_s))
    answering = (1.0 - reasoning) * slo_share * slo_share
    joining_s = steps.decode_s(requests, held) + (requests + 1.0) * steps.per_request_s
    unlisted = max(0.0, reported.backlog - reported.prompt_tokens)
    unlisted_s = steps.backlog_s(unlisted, max(1.0, reported.waiting - reported.prompts))
    return Offer(
        barred=reported.barred,
        requests=requests,
        held=held,
        swapped=reported.swapped,
        free=reported.capacity - held,
        free_token_s=costs.expected_tokens * step_s / max(1.0, used),
        weight=reasoning + answering,
        start_s=step_s + unlisted_s + unlisted * step_token_s,
        step_token_s=step_token_s,
        mean_tokens=reported.context // max(1.0, requests),
        joining_s=joining_s,
        arriving_s=joining_s - kind_s * answering / max(reasoning + answering, 1e-9),
        joining_token_s=(requests + 1.0) * steps.per_kv_token_s,
    )


class Offers:
    """The offers of a view's instances, in instance-id order. Call `update` before each decision."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._seen = SeenInstances()
        self._instances: list[InstanceView] = []
        # [fields, instances].
        self._offers: Floats = np.empty((len(Offer._fields), 0))
        self._steps: Floats = np.empty((len(_COEFFICIENTS), 0))
        # Views of them by field.
        self.offer, self.steps = Offer(*self._offers), StepTimes(*self._steps)
        self._queues = QueueColumns(0)
        self._models: list[StepModel] = []
        self._shortest_s = math.inf

    @property
    def instances(self) -> Sequence[InstanceView]:
        """Return the instances; valid until the next call of `update`."""
        return self._instances

    @property
    def at(self) -> Mapping[str, int]:
        """Return the positions of the instances by id."""
        return self._seen.at

    def of(self, position: int) -> Offer[float]:
        """Return what one instance offers."""
        return Offer(*self._offers[:, position].tolist())

    def of_each(self, positions: Sequence[int]) -> Offer[Floats]:
        """Return what some instances offer, each number as [instances, 1]."""
        return Offer(*self._offers[:, positions, np.newaxis])

    def update(self, view: ClusterView) -> None:
        """Use the instances of this view, and compute the offers of those that changed again."""
        changed = self._seen.changed(view)
        self._seen.replace(view, changed)
        views = self._instances = list(view.instances.values())
        steps_of = self.costs.steps_of
        if changed is None or any(steps_of(views[n]) is not self._models[n] for n in changed):
            changed, self._models = list(range(len(views))), list(map(steps_of, views))
            self._shortest_s = min((steps.decode_base_s for steps in self._models), default=math.inf)
            self._offers = np.empty((len(self._offers), len(views)))
            self._steps = np.array([list(map(read, self._models)) for read in _COEFFICIENTS])
            self.offer, self.steps = Offer(*self._offers), StepTimes(*self._steps)
            self._queues = QueueColumns(len(views))
        for n in changed:
            reported = self._read(n, views[n])
            self._offers[:, n] = offer_of(self.costs, reported, self._models[n], self._shortest_s)

    def _read(self, position: int, instance: InstanceView) -> Reported:
        """Return what the view says of the instance, and set its queue."""
        backlog, requests = instance.prefill_backlog_tokens, table_of(instance.requests)
        prompts = requests.prompts() if backlog else ()
        self._queues.set(position, prompts, backlog, self.costs.steps_of(instance))
        return Reported(
            0.0 if instance.state is InstanceState.ACTIVE else math.inf,
            instance.running,
            instance.waiting,
            instance.kv_used_tokens,
            instance.host_kv_tokens,
            backlog,
            instance.kv_capacity_tokens,
            instance.context_tokens,
            requests.reasoning(),
            len(prompts),
            sum(length for _, length in prompts),
        )

    def usable_tokens(self, cached: Mapping[str, CachedTokens]) -> Floats | float:
        """Return the cached tokens of an arrival on each instance, as equivalent tokens on its device."""
        if not cached:
            return 0.0
        tokens = np.zeros(len(self._instances))
        for name, held in cached.items():
            position = self._seen.at.get(name)
            if position is not None:
                tokens[position] = self.costs.usable_tokens(self._instances[position], held)
        return tokens

    def arrival_s(self, arrival: Arrival, usable_tokens: Floats | float, now: float) -> Floats:
        """Return what an arrival costs on each instance; infinite where it may not go.

        `usable_tokens` need not be computed. An arrival that resumes prefills its output as well.
        """
        offer, steps, expected = self.offer, self.steps, self.costs.expected_tokens
        prompt_tokens = arrival.context_tokens
        own_s = (steps.per_token_s + steps.per_token_squared_s * prompt_tokens) * prompt_tokens
        if arrival.cached:
            own_s -= steps.compute_s(usable_tokens)
        # Prompts are computed in steps shared with decodes; the step in progress ends first.
        wait_s = offer.start_s + own_s + (prompt_tokens - usable_tokens) * offer.step_token_s
        delayed = offer.weight * offer.requests
        if self._queues.prompts:
            ahead = self._queues.ahead(nominal_s(prompt_tokens, prompt_tokens * prompt_tokens), now)
            wait_s += ahead.seconds + ahead.tokens * offer.step_token_s
            delayed = ahead.behind + offer.weight * np.maximum(0.0, offer.requests - ahead.behind)
        patience_s = self.costs.patience_s + PREFILLS * self.costs.nominal.compute_s(prompt_tokens)
        wait_s *= 1.0 + wait_s / patience_s
        joining_s = offer.arriving_s + offer.joining_token_s * prompt_tokens
        costs_s: Floats = expected * offer.weight * joining_s + wait_s + own_s * delayed
        costs_s += shortage_s(offer, prompt_tokens + expected) + offer.barred
        if arrival.excluded:
            costs_s[[self.at[name] for name in arrival.excluded if name in self.at]] = np.inf
        return costs_s

    def prices_s(self) -> Floats:
        """Return what decoding one more request of mean length costs on each instance; infinite where it may
        not go."""
        offer, expected = self.offer, self.costs.expected_tokens
        joining_s = offer.joining_s + offer.joining_token_s * offer.mean_tokens
        prices_s: Floats = offer.barred + expected * joining_s
        return prices_s + shortage_s(offer, offer.mean_tokens + expected)


def shortage_s(offer: Offer[float] | Offer[Floats], more_tokens: Floats | float) -> Floats:
    """Return the wait until an instance has so many more tokens free."""
    wait_s: Floats = np.maximum(0.0, more_tokens - offer.free) * offer.free_token_s
    return wait_s
