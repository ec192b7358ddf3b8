"""The cost model, by column: the predicted seconds that a request costs all requests concerned.

While an instance decodes B requests, each second counts B times, since B requests wait for their next token.
A decode step therefore costs B * step(B, K), where K is the number of KV tokens. A request that joins for R
steps costs R times the increase of that: its own steps, and the slowdown of the others' steps. Added to it
are the wait for the request's first token, its prefill, during which the others wait, and, if KV is short,
the wait until enough KV is free.

Between two placements, few of a thousand instances have reported, so what depends on an instance alone is
kept in columns (`Offers`) and computed again only for those. A column depends on nothing but the instance's
view and the step times of all, so that it affects no decision; with `tpot_limit` also on when it was made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Generic, NamedTuple

import numpy as np

from tailrace.cluster import Arrival, CachedTokens, ClusterView, InstanceState, InstanceView
from tailrace.intra.base import FEWEST_DECODING
from tailrace.intra.earliest_due import LATE_S, PREFILLS, nominal_s, waits
from tailrace.perf.steps import Floats, Number, StepModel, StepTimes, held_tokens
from tailrace.policy.columns import SeenInstances
from tailrace.policy.requests import Prompt, table_of
from tailrace.policy.tailrace.queue import QueueColumns
from tailrace.slo import DEFAULT_TTFT_S


@dataclass(frozen=True, slots=True)
class Costs:
    """The parameters of the cost model.

    - `nominal`: step times of instances that have not been measured.
    - `tpot_slo_s`, `ttft_slo_s`: the SLOs against which the delay of requests that answer, and of those that
      reason, is weighted.
    - `tpot_limit`, `late_s`: of the batch order, see `tailrace.intra.earliest_due`.
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
    ttft_slo_s: float = DEFAULT_TTFT_S
    tpot_limit: float = math.inf
    late_s: float = LATE_S
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
    # What a second of delay for a decoding request counts, from 0 to 1, because it may answer; and at most
    # more because it may reason (`Offers.reasoning_weights`).
    answering: Number
    reasoning: Number
    # Of the requests that reason: their number, and the sums of their arrival times and of the times that
    # they may take for what they have generated.
    reasoners: Number
    arrivals_s: Number
    allowed_s: Number
    # Seconds until a prompt would start if no listed prompt were ahead of it: the step in progress and the
    # unlisted backlog. Decode time in the steps that compute a prompt token.
    start_s: Number
    step_token_s: Number
    # Tokens of a mean request.
    mean_tokens: Number
    # Increase of the batch's step cost by a request; per token of its context; what its own step is spared,
    # weighted, because it may answer.
    joining_s: Number
    joining_token_s: Number
    spared_s: Number


def offer_of(
    costs: Costs, instance: InstanceView, prompts: Sequence[Prompt], steps: StepModel, shortest_s: float
) -> Offer[float]:
    """Compute what an instance with these step times offers.

    `prompts`: those that its view lists. `shortest_s`: shortest idle step of all instances.
    """
    running, used, backlog = instance.running, instance.kv_used_tokens, instance.prefill_backlog_tokens
    requests, held = running + instance.waiting, used + backlog
    step_s = steps.decode_s(running, used)
    step_token_s = step_s / steps.chunk_tokens
    # An answering request counts by the square of the step's share of the TPOT SLO: little while the answer
    # is well within it. What the idle step of a slow kind takes beyond the shortest one delays no answer as
    # long as it is within the SLO.
    reasoners, arrivals_s, made_tokens = table_of(instance.requests).reasoning()
    reasoning = min(1.0, reasoners / max(1, requests - len(prompts)))
    kind_s = steps.decode_base_s - shortest_s if steps.decode_base_s < costs.tpot_slo_s else 0.0
    slo_share = min(1.0, (step_s - kind_s) / (costs.tpot_slo_s - kind_s))
    answering = (1.0 - reasoning) * slo_share * slo_share
    unlisted = max(0, backlog - sum(length for _, length in prompts))
    unlisted_s = steps.backlog_s(unlisted, max(1, instance.waiting - len(prompts)))
    return Offer(
        barred=0.0 if instance.state is InstanceState.ACTIVE else math.inf,
        requests=requests,
        held=held,
        swapped=instance.host_kv_tokens,
        free=instance.kv_capacity_tokens - held,
        free_token_s=costs.expected_tokens * step_s / max(1, used),
        answering=answering,
        reasoning=reasoning,
        reasoners=reasoners,
        arrivals_s=arrivals_s,
        # Above 0 where nobody reasons, too: it divides.
        allowed_s=max(1, reasoners) * costs.ttft_slo_s + made_tokens * costs.tpot_slo_s,
        start_s=step_s + unlisted_s + unlisted * step_token_s,
        step_token_s=step_token_s,
        mean_tokens=instance.context_tokens // max(1, requests),
        joining_s=steps.decode_s(requests, held) + (requests + 1.0) * steps.per_request_s,
        joining_token_s=(requests + 1.0) * steps.per_kv_token_s,
        spared_s=answering * kind_s,
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

    def update(self, view: ClusterView, now: float) -> None:
        """Use the instances of this view, and compute the offers of those that changed again."""
        costs, changed = self.costs, self._seen.changed(view)
        self._seen.replace(view, changed)
        views = self._instances = list(view.instances.values())
        steps_of = costs.steps_of
        if changed is None or any(steps_of(views[n]) is not self._models[n] for n in changed):
            changed, self._models = list(range(len(views))), list(map(steps_of, views))
            self._shortest_s = min((steps.decode_base_s for steps in self._models), default=math.inf)
            self._offers = np.empty((len(self._offers), len(views)))
            self._steps = np.array([list(map(read, self._models)) for read in _COEFFICIENTS])
            self.offer, self.steps = Offer(*self._offers), StepTimes(*self._steps)
            self._queues = QueueColumns(len(views))
        for n in changed:
            instance, steps = views[n], self._models[n]
            backlog = instance.prefill_backlog_tokens
            prompts = table_of(instance.requests).prompts() if backlog else ()
            # Late prompts of an instance that keeps them back let an arrival pass. Each report tells anew
            # which ones are late.
            wait = (
                bool(prompts)
                and instance.running >= FEWEST_DECODING
                and waits(
                    True, instance.token_interval_s, steps.decode_s(1, 0), costs.tpot_limit, costs.tpot_slo_s
                )
            )
            late = (now, costs.ttft_slo_s) if wait else None
            self._queues.set(n, prompts, backlog, steps, costs.late_s, late)
            self._offers[:, n] = offer_of(costs, instance, prompts, steps, self._shortest_s)

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

    def reasoning_weights(self, now: float) -> Floats:
        """Return what a second of delay for a decoding request counts on each instance, from 0 to 1, because
        it may reason; `Offer.answering` is what it counts because it may answer.

        A request that reasons may take the TPOT SLO for each of its tokens (`Slo`), so that a delay costs it
        nothing before that time is used up. Like an answer it counts by a square: of the share of the time
        that the instance's requests have used together.
        """
        offer = self.offer
        used = (offer.reasoners * now - offer.arrivals_s) / offer.allowed_s
        weights: Floats = offer.reasoning * np.minimum(np.maximum(used, 0.0), 1.0) ** 2
        return weights

    def arrival_s(self, arrival: Arrival, usable_tokens: Floats | float, now: float) -> Floats:
        """Return what an arrival costs on each instance; infinite where it may not go.

        `usable_tokens` need not be computed. An arrival that resumes prefills its output as well.
        """
        offer, steps, expected = self.offer, self.steps, self.costs.expected_tokens
        reasoning = self.reasoning_weights(now)
        prompt_tokens = arrival.context_tokens
        own_s = (steps.per_token_s + steps.per_token_squared_s * prompt_tokens) * prompt_tokens
        if arrival.cached:
            own_s -= steps.compute_s(usable_tokens)
        # Prompts are computed in steps shared with decodes; the step in progress ends first.
        wait_s = offer.start_s + own_s + (prompt_tokens - usable_tokens) * offer.step_token_s
        behind: Floats | float = 0.0
        decoding = offer.requests
        if self._queues.prompts:
            ahead = self._queues.ahead(nominal_s(prompt_tokens, prompt_tokens * prompt_tokens), now)
            wait_s += ahead.seconds + ahead.tokens * offer.step_token_s
            behind, decoding = ahead.behind, np.maximum(0.0, offer.requests - ahead.behind)
        patience_s = self.costs.patience_s + PREFILLS * self.costs.nominal.compute_s(prompt_tokens)
        wait_s *= 1.0 + wait_s / patience_s
        # Of the answers on all instances that take arrivals, the prefill delays the instance's share by KV,
        # not those that run there now: to go where few run would give all long contexts to one instance.
        open_ = offer.barred == 0.0
        capacity = (offer.free + offer.held) * open_
        answers = (offer.answering * open_) @ decoding * capacity / max(1.0, capacity.sum())
        delayed = behind + answers + reasoning * decoding
        weight = offer.answering + reasoning
        joining_s = weight * (offer.joining_s + offer.joining_token_s * prompt_tokens) - offer.spared_s
        costs_s: Floats = expected * joining_s + wait_s + own_s * delayed
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
