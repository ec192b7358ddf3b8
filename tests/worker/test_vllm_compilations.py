"""Detection of torch compilations in the engine thread, when a request first needs a function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo

from worker_agent.engine.vllm.facts import Compilations

pytestmark = pytest.mark.vllm


def test_compilation_is_visible_while_it_runs_and_counted_at_its_end() -> None:
    # Elsewhere in the tests nothing is compiled (tests/conftest.py).
    with torch._dynamo.config.patch(disable=False):
        compilations, seen = Compilations(), []

        def compiler(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
            seen.append((compilations.running, compilations.finished))
            forward: Callable[..., object] = module.forward
            return forward

        double = torch.compile(lambda tensor: tensor + tensor, backend=compiler)
        assert not compilations.running
        assert double(torch.ones(2)).sum() == 4
        assert seen == [(True, 0)]
        double(torch.ones(2))
        assert (compilations.running, compilations.finished) == (False, 1)
