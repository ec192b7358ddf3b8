"""Which of an instance's requests are in prefill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tailrace.cluster import InstanceView, Phase

# When it arrived, and its prompt's tokens.
Prompt = tuple[float, int]


class ListsPrompts(ABC):
    """Requests whose prompts can be told without making a view of each."""

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """What the function `prompts` returns for them."""


def prompts(instance: InstanceView) -> Sequence[Prompt]:
    """As the view says; else read off its requests. In any order."""
    if instance.prompts is not None:
        return instance.prompts
    requests = instance.requests
    if isinstance(requests, ListsPrompts):
        return requests.prompts()
    prefill = Phase.PREFILL
    return [(r.arrival_s, r.prompt_tokens) for r in requests if r.phase is prefill]
