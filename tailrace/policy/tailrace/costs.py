"""The cost model: the predicted seconds that a request costs all requests concerned.

While an instance decodes B requests, each second counts B times, since B requests wait for their next token.
A decode step therefore costs B * step(B, K), where K is the number of KV tokens. A request that joins for R
steps costs R times the increase of that: its own steps, and the slowdown of the others' steps. Added to it
are the wait for the request's first token, its prefill, during which the others wait, and, if KV is short,
the wait until enough KV is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.cluster import CachedTokens, InstanceView
from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.perf.steps import Number, StepModel, held_tokens


@dataclass(frozen=True, slots=True)
class Costs:
    """Compute costs in seconds, summed over all requests concerned.

    - `steps`: step times of instances that have not been measured.
    - `penalty`: the cost of unequal lengths in a batch; None: no such cost.
    - `expected_tokens`: expected output of an arrival. 256 is near the mean of ShareGPT's answers, as in
      CascadeInfer's QoE model here.
    - `patience_s`: a wait for the first token counts double once it reaches this time plus the longest that
      the prompt yields to others inside an instance (`tailrace.intra.earliest_due`). Half a second, for very
      short prompts, is half of what a person notices as an interruption (Nielsen's one second).
    - `tpot_slo_s`: the SLO against which decode steps of answering requests are weighted (`arrival`).
    - `open_s`, `link_bytes_per_s`: time to open and commit a migration, and assumed bandwidth of its copy
      (100 Gbit/s).
    """

    steps: StepModel
    penalty: FittedLengthPenalty | None = None
    expected_tokens: float = 256.0
    patience_s: float = 0.5
    tpot_slo_s: float = 0.15
    open_s: float = 0.01
    link_bytes_per_s: float = 12.5e9

    # ---- arrival

    def steps_of(self, instance: InstanceView) -> StepModel:
        """Return the instance's measured step times, else the nominal ones."""
        measured = instance.measured
        return self.steps if measured is None else measured.steps

    def held_tokens(self, instance: InstanceView, held: CachedTokens) -> int:
        """Return the cached tokens of an arrival on an instance, as equivalent tokens on its device."""
        return held_tokens(self.steps_of(instance), held.device, held.total)

    def first_token_s(self, instance: InstanceView, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Return the TTFT of an arrival: the queue's prefill and its own, in steps shared with decodes, plus
        the step in progress.

        `cached_tokens` of the prompt are not computed.
        """
        measured = instance.measured
        steps = self.steps if measured is None else measured.steps
        queued = instance.prefill_backlog_tokens
        count = (queued + prompt_tokens - cached_tokens) / steps.chunk_tokens + 1.0
        decode_s = steps.decode_s(instance.running, instance.kv_used_tokens)
        return (
            count * decode_s
            + steps.backlog_s(queued, max(1, instance.waiting))
            + steps.compute_s(prompt_tokens)
            - steps.compute_s(cached_tokens)
        )

    # ---- decoding

    def joining_s(self, instance: InstanceView, tokens: int, remaining: float, longest: int = 0) -> float:
        """Return the cost of decoding a request with `tokens` of context for `remaining` tokens here.

        `longest`: longest context of a request here; used only with a length penalty.
        """
        slowdown_s = remaining * self.slowdown_s(instance, tokens, longest)
        return slowdown_s + self.joining_shortage_s(instance, tokens, remaining)

    def joining_shortage_s(self, instance: InstanceView, tokens: int, remaining: float) -> float:
        """Return the part of `joining_s` that is the wait for KV; not negative."""
        return self.shortage_s(instance, tokens + min(remaining, self.expected_tokens))

    def staying_s(self, instance: InstanceView, tokens: int, remaining: float, longest: int = 0) -> float:
        """Return the same for a request that is already here: the saving if it left.

        `longest`: longest context of the other requests here.
        """
        requests = max(0, instance.running + instance.waiting - 1)
        held = max(0, instance.kv_used_tokens + instance.prefill_backlog_tokens - tokens)
        slowdown_s = self._slowdown_s(self.steps_of(instance), requests, held, tokens, longest)
        return remaining * slowdown_s + self.shortage_s(instance, min(remaining, self.expected_tokens))

    def shortage_s(self, instance: InstanceView, more_tokens: float) -> float:
        """Return the wait for KV: the tokens in excess of capacity over the rate at which requests free KV.

        Demand includes KV in host memory and the predicted load (ARES, section 5.2). Each request is assumed
        to free its context once in `expected_tokens` steps.
        """
        tokens: float = instance.kv_used_tokens + instance.prefill_backlog_tokens + instance.host_kv_tokens
        if instance.future_load:
            tokens = max(tokens, *instance.future_load)
        over = tokens + more_tokens - instance.kv_capacity_tokens
        if over <= 0.0:
            return 0.0
        step_s = self.steps_of(instance).decode_s(instance.running, instance.kv_used_tokens)
        return self.freeing_s(over, step_s, max(1, instance.kv_used_tokens))

    def freeing_s(self, tokens: Number, step_s: Number, used: Number) -> Number:
        """Return the seconds until `tokens` of the `used` ones (at least 1) are freed."""
        return tokens * (self.expected_tokens * step_s) / used

    # ---- moving

    def transfer_s(self, source: InstanceView, tokens: Number) -> Number:
        """Return the seconds to migrate `tokens` of KV from `source`."""
        return tokens * self.steps_of(source).kv_bytes_per_token / self.link_bytes_per_s + self.open_s

    # ---- slowdown of the batch

    def slowdown_s(self, instance: InstanceView, tokens: int, longest: int) -> float:
        """Return the increase of the batch's step cost when a request with `tokens` of context joins."""
        requests = instance.running + instance.waiting
        held = instance.kv_used_tokens + instance.prefill_backlog_tokens
        return self._slowdown_s(self.steps_of(instance), requests, held, tokens, longest)

    def slowdown_terms(self, instance: InstanceView) -> tuple[float, float]:
        """Return x and y such that without a length penalty `slowdown_s` is x + y * tokens."""
        steps, requests = self.steps_of(instance), instance.running + instance.waiting
        held = instance.kv_used_tokens + instance.prefill_backlog_tokens
        step_s = steps.decode_s(requests, held) + (requests + 1) * steps.per_request_s
        return step_s, (requests + 1) * steps.per_kv_token_s

    def _slowdown_s(self, steps: StepModel, requests: int, held: int, tokens: int, longest: int) -> float:
        """Return the increase of B * step(B, K), B = `requests`, K = `held`, by a request of `tokens`."""
        if self.penalty is not None:
            after_s = self._batch_s(steps, requests + 1, held + tokens, max(longest, tokens))
            return after_s - self._batch_s(steps, requests, held, longest)
        each_s = steps.per_request_s + steps.per_kv_token_s * tokens
        return steps.decode_s(requests, held) + (requests + 1) * each_s

    def _batch_s(self, steps: StepModel, requests: int, held: int, longest: int) -> float:
        """Return B * step(B, K) with the length penalty."""
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
class Longest:
    """The two longest contexts on an instance."""

    tokens: int
    request_id: str
    second: int

    @staticmethod
    def of(instance: InstanceView) -> Longest:
        """Find them in all of the instance's requests."""
        tokens, name, second = 0, "", 0
        for request in instance.requests:
            length = request.context_tokens
            if length > tokens:
                tokens, name, second = length, request.request_id, tokens
            elif length > second:
                second = length
        return Longest(tokens, name, second)

    def without(self, request_id: str) -> int:
        """Return the longest context of all requests but this one."""
        return self.second if request_id == self.request_id else self.tokens
