"""What a request costs everybody, in predicted seconds: the one currency of all decisions.

While an instance decodes B requests, each second counts B times: so many wait for their next token. A step
costs B * step(B, K), K being the tokens of KV, and a request that joins for R steps costs what R such steps
get dearer by: its own steps, and what it adds to those of the others. To that come the wait for its first
token, its prefill, for which all others wait, and, where KV gets short, the wait until enough of it is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from tailrace.cluster import CachedTokens, InstanceView
from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.perf.reuse import held_tokens
from tailrace.perf.steps import Number, StepModel


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, summed over all requests concerned.

    - `steps`: of instances of which nothing was measured.
    - `penalty`: what unequal lengths cost where these instances run; None: nothing.
    - `expected_tokens`: what an arrival is expected to put out, of which nothing is known. 256: near the mean
      of ShareGPT's answers, as in CascadeInfer's QoE model here.
    - `patience_s`: a wait for the first token counts double when it is as long as that and the most that the
      prompt yields inside an instance (`tailrace.intra.due`). Half a second is half of what a person notices
      as an interruption (Nielsen's one second), for prompts of next to no length.
    - `tpot_slo_s`: what the time of those who read an answer is measured against (`offers`).
    - `open_s`, `link_bytes_per_s`: opening and committing a migration, and its copy: 100 Gbit/s.
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
        """Its step times: as measured of it, else the nominal ones."""
        measured = instance.measured
        return self.steps if measured is None else measured.steps

    def held_tokens(self, instance: InstanceView, held: CachedTokens) -> int:
        """What an instance holds of an arrival, in tokens on its device."""
        return held_tokens(self.steps_of(instance), held.device, held.total)

    def first_token_s(self, instance: InstanceView, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """TTFT of an arrival here: the queue's prefill and its own, in steps shared with decodes.

        One more step for the one that is under way. `cached_tokens` of the prompt are not computed.
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
        """A request with `tokens` of context coming here for `remaining` more.

        `longest`: context of the longest request here; matters only with a penalty.
        """
        dearer_s = remaining * self.dearer_s(instance, tokens, longest)
        return dearer_s + self.joining_shortage_s(instance, tokens, remaining)

    def joining_shortage_s(self, instance: InstanceView, tokens: int, remaining: float) -> float:
        """The part of it that is the wait for KV; not negative."""
        return self.shortage_s(instance, tokens + min(remaining, self.expected_tokens))

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
        return self.freeing_s(over, step_s, max(1, instance.kv_used_tokens))

    def freeing_s(self, tokens: Number, step_s: Number, used: Number) -> Number:
        """Until so many of `used` tokens (at least 1) are free."""
        return tokens * (self.expected_tokens * step_s) / used

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

    def at_least(self, instances: Iterable[InstanceView]) -> AtLeast:
        """Of joining any of these, not none; nothing with a penalty, which is no sum of a part a token."""
        if self.penalty is not None:
            return AtLeast()
        step_s = per_token_s = inf
        for instance in instances:
            requests = instance.running + instance.waiting
            step_s = min(step_s, self.dearer_s(instance, 0, 0))
            per_token_s = min(per_token_s, (requests + 1) * self.steps_of(instance).per_kv_token_s)
        # So that rounding hides no move.
        return AtLeast(step_s * (1.0 - 1e-9), per_token_s * (1.0 - 1e-9))

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
class AtLeast:
    """What decoding on any of some instances costs at the least, besides a shortage of KV.

    A step of all gets dearer by `step_s`, and by `per_token_s` for each token of the one that comes.
    """

    step_s: float = 0.0
    per_token_s: float = 0.0

    def joining_s(self, tokens: int, remaining: float) -> float:
        """A request with `tokens` of context for `remaining` more."""
        return remaining * (self.step_s + self.per_token_s * tokens)


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
