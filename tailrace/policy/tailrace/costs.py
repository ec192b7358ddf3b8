"""What a request costs everybody, in predicted seconds: the one currency of all decisions.

While an instance decodes B requests, each second counts B times: so many wait for their next token. A step
costs B * step(B, K), K being the tokens of KV, and a request that joins for R steps costs what R such steps
get dearer by: its own steps, and what it adds to those of the others. To that come the wait for its first
token, its prefill, for which all others wait, and, where KV gets short, the wait until enough of it is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from tailrace.cluster import InstanceView
from tailrace.intra.due import PREFILLS, due_s
from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.policy.phase_load import phase_load
from tailrace.policy.tailrace.queue import Queue
from tailrace.policy.tailrace.steps import StepModel


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, summed over all requests concerned.

    - `steps`: of instances of which nothing was measured.
    - `penalty`: what unequal lengths cost where these instances run; None: nothing.
    - `expected_tokens`: what an arrival is expected to put out, of which nothing is known. 256: near the mean
      of ShareGPT's answers, as in CascadeInfer's QoE model here.
    - `patience_s`, `patience_prefills`: a wait for the first token counts double when it is as long as
      `patience_s` and that many times the prompt's own prefill: what it yields to others inside an instance
      (`tailrace.intra.due`), for the same reason. Half a second is half of what a person notices as an
      interruption (Nielsen's one second), for prompts of next to no length.
    - `tpot_slo_s`: what the time of those who read an answer is measured against (`_hurry`).
    - `open_s`, `link_bytes_per_s`: opening and committing a migration, and its copy: 100 Gbit/s.
    """

    steps: StepModel
    penalty: FittedLengthPenalty | None = None
    expected_tokens: float = 256.0
    patience_s: float = 0.5
    patience_prefills: float = PREFILLS
    tpot_slo_s: float = 0.15
    open_s: float = 0.01
    link_bytes_per_s: float = 12.5e9

    # ---- arrival

    def steps_of(self, instance: InstanceView) -> StepModel:
        """Its step times: as measured of it, else the nominal ones."""
        measured = instance.measured
        return self.steps if measured is None else measured.steps

    def first_token_s(self, instance: InstanceView, prompt_tokens: int) -> float:
        """TTFT of an arrival here: the queue's prefill and its own, in steps shared with decodes.

        One more step for the one that is under way.
        """
        measured = instance.measured
        steps = self.steps if measured is None else measured.steps
        queued = instance.prefill_backlog_tokens
        count = (queued + prompt_tokens) / steps.chunk_tokens + 1.0
        decode_s = steps.decode_s(instance.running, instance.kv_used_tokens)
        return count * decode_s + steps.backlog_s(queued, instance.waiting) + steps.compute_s(prompt_tokens)

    def cheapest_arrival(
        self, offers: Sequence[Offer], prompt_tokens: int, now: float
    ) -> InstanceView | None:
        """Where an arrival costs least; the first of equals. None: no offers."""
        if not offers:
            return None
        steps, remaining = offers[0].steps, self.expected_tokens
        own_s = steps.compute_s(prompt_tokens)
        # A user's, so the same for all, however fast they are: by the first.
        patience_s = self.patience_s + self.patience_prefills * own_s
        due = due_s(now, prompt_tokens)
        least_s, found = inf, None
        for offer in offers:
            if offer.steps is not steps:
                steps = offer.steps
                own_s = steps.compute_s(prompt_tokens)
            wait_s = own_s + (prompt_tokens / steps.chunk_tokens + 1.0) * offer.step_s
            cost_s = offer.joining_s + offer.joining_s_per_token * prompt_tokens
            # The queue only adds to it: mostly this is enough to know.
            if cost_s + wait_s >= least_s:
                continue
            queue, instance = offer.queue, offer.instance
            after, queued = 0, queue.tokens[-1] + queue.unknown
            if queued:
                tokens, seconds, after = queue.before(due)
                wait_s += seconds + tokens / steps.chunk_tokens * offer.step_s
            others = max(0, instance.running + instance.waiting - after)
            cost_s += wait_s * (1.0 + wait_s / patience_s) + own_s * (after + offer.hurry * others)
            if self.penalty is not None:
                dearer_s = self.dearer_s(instance, prompt_tokens, offer.longest)
                cost_s += offer.hurry * remaining * dearer_s
            if cost_s >= least_s:
                continue
            cost_s += self.shortage_s(instance, prompt_tokens + remaining)
            if cost_s < least_s:
                least_s, found = cost_s, instance
        return found

    def offer(self, instance: InstanceView) -> Offer:
        """What an arrival's cost here depends on, whatever its length."""
        steps = self.steps_of(instance)
        requests = instance.running + instance.waiting
        held = instance.kv_used_tokens + instance.prefill_backlog_tokens
        step_s = steps.decode_s(instance.running, instance.kv_used_tokens)
        queue = Queue.of(instance, steps)
        hurry = self._hurry(instance, queue, step_s)
        joining_s = per_token_s = 0.0
        longest = 0
        if self.penalty is None:
            each = hurry * self.expected_tokens
            joining_s = each * (steps.decode_s(requests, held) + (requests + 1) * steps.per_request_s)
            per_token_s = each * (requests + 1) * steps.per_kv_token_s
        else:
            longest = Longest.of(instance).tokens
        return Offer(instance, steps, step_s, hurry, joining_s, per_token_s, longest, queue)

    def _hurry(self, instance: InstanceView, queue: Queue, step_s: float) -> float:
        """What a second of those who decode here counts, from 0 to 1.

        Reasoning is a wait for the first token, and counts whole. Who reads an answer is not late yet, and
        counts by how much of the TPOT SLO a step takes.
        """
        counted = instance.phase_load or phase_load(instance.requests)
        prompts = len(queue.due)
        decoding = max(1, instance.running + instance.waiting - prompts)
        reasons = min(1.0, max(0, counted.reasoning - prompts) / decoding)
        return reasons + (1.0 - reasons) * min(1.0, step_s / self.tpot_slo_s)

    # ---- decoding

    def joining_s(self, instance: InstanceView, tokens: int, remaining: float, longest: int = 0) -> float:
        """A request with `tokens` of context coming here for `remaining` more.

        `longest`: context of the longest request here; matters only with a penalty.
        """
        more = tokens + min(remaining, self.expected_tokens)
        return remaining * self.dearer_s(instance, tokens, longest) + self.shortage_s(instance, more)

    def staying_s(self, instance: InstanceView, tokens: int, remaining: float, longest: int = 0) -> float:
        """The same for a request that is here: what would be saved if it left.

        `longest`: of all others here.
        """
        requests = max(0, instance.running + instance.waiting - 1)
        held = max(0, instance.kv_used_tokens + instance.prefill_backlog_tokens - tokens)
        dearer_s = self._dearer_s(self.steps_of(instance), requests, held, tokens, longest)
        return remaining * dearer_s + self.shortage_s(instance, min(remaining, self.expected_tokens))

    def shortage_s(self, instance: InstanceView, more_tokens: float) -> float:
        """Wait for KV: tokens that are too many, at the rate at which requests free theirs.

        Those too many count with what is on the host, or predicted to come (ARES, section 5.2). Each request
        is taken to free its context once in `expected_tokens` steps.
        """
        tokens: float = instance.kv_used_tokens + instance.prefill_backlog_tokens + instance.host_kv_tokens
        if instance.future_load:
            tokens = max(tokens, *instance.future_load)
        over = tokens + more_tokens - instance.kv_capacity_tokens
        if over <= 0.0:
            return 0.0
        step_s = self.steps_of(instance).decode_s(instance.running, instance.kv_used_tokens)
        life_s = self.expected_tokens * step_s
        return over * life_s / max(1, instance.kv_used_tokens)

    # ---- moving

    def transfer_s(self, source: InstanceView, tokens: int) -> float:
        """A migration of so many tokens of KV from there."""
        return self.open_s + tokens * self.steps_of(source).kv_bytes_per_token / self.link_bytes_per_s

    # ---- a step of all

    def dearer_s(self, instance: InstanceView, tokens: int, longest: int) -> float:
        """By how much a step of all here gets dearer when a request of `tokens` joins."""
        requests = instance.running + instance.waiting
        held = instance.kv_used_tokens + instance.prefill_backlog_tokens
        return self._dearer_s(self.steps_of(instance), requests, held, tokens, longest)

    def _dearer_s(self, steps: StepModel, requests: int, held: int, tokens: int, longest: int) -> float:
        """B * step(B, K) from B = `requests`, K = `held` to one request of `tokens` more."""
        if self.penalty is not None:
            after_s = self._batch_s(steps, requests + 1, held + tokens, max(longest, tokens))
            return after_s - self._batch_s(steps, requests, held, longest)
        each_s = steps.per_request_s + steps.per_kv_token_s * tokens
        return steps.decode_s(requests, held) + (requests + 1) * each_s

    def _batch_s(self, steps: StepModel, requests: int, held: int, longest: int) -> float:
        """B * step(B, K), lengthened by the penalty."""
        if not requests:
            return 0.0
        penalty = self.penalty
        assert penalty is not None
        attention_s = steps.per_kv_token_s * held
        rest_s = steps.decode_base_s + steps.per_request_s * requests
        factor = 1.0
        if requests > 1 and longest > 0:
            mean = max(1.0, held / requests)
            factor = penalty.shape.factor(requests, mean, max(mean, longest))
        if penalty.applies_to == "attention":
            return requests * (rest_s + factor * attention_s)
        return requests * factor * (rest_s + attention_s)


@dataclass(frozen=True, slots=True)
class Offer:
    """An instance as arrivals see it, worked out once for each report of it.

    `step_s`: one decode step. `hurry`: what a second of decoding counts. `joining_s`, and as much again per
    prompt token: what decoding with the others costs; 0 with a penalty, which makes that no sum of the two.
    `longest`: longest context, with a penalty.
    """

    instance: InstanceView
    steps: StepModel
    step_s: float
    hurry: float
    joining_s: float
    joining_s_per_token: float
    longest: int
    queue: Queue


@dataclass(frozen=True, slots=True)
class Longest:
    """The two longest contexts on an instance."""

    tokens: int
    request_id: str
    second: int

    @staticmethod
    def of(instance: InstanceView) -> Longest:
        """Reads all its requests."""
        tokens, name, second = 0, "", 0
        for request in instance.requests:
            length = request.context_tokens
            if length > tokens:
                tokens, name, second = length, request.request_id, tokens
            elif length > second:
                second = length
        return Longest(tokens, name, second)

    def without(self, request_id: str) -> int:
        """The longest of all but this one."""
        return self.second if request_id == self.request_id else self.tokens
