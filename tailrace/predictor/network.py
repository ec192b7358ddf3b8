"""The predictor's network: ARES, section 4.2, Eq. (2), a 4-layer MLP with ReLU."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

PAPER_WIDTHS: Final = (2048, 512, 64)
"""The widths that the paper uses for a hidden size of 3,584."""


def widths_for(hidden_size: int) -> tuple[int, int, int]:
    """The paper's widths in proportion to the hidden size, as multiples of 32 and never below 64."""
    first, second, third = (
        min(width, max(64, round(width * hidden_size / 3584 / 32) * 32)) for width in PAPER_WIDTHS
    )
    return first, second, third


class LengthMlp(nn.Module):  # type: ignore[misc]
    """States (n, d) to tokens still to come (n,).

    Beyond the paper's equation: biases, and inputs that are standardised by the training samples' mean and
    deviation. The last layer's unit is `unit` tokens, so that its weights are of the others' size.
    """

    def __init__(self, hidden_size: int, widths: tuple[int, int, int]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(hidden_size))
        self.register_buffer("deviation", torch.ones(hidden_size))
        self.register_buffer("unit", torch.ones(()))
        sizes = (hidden_size, *widths, 1)
        self.layers = nn.ModuleList(nn.Linear(sizes[i], sizes[i + 1]) for i in range(4))

    def fit_inputs(self, hidden: torch.Tensor, remaining: torch.Tensor) -> None:
        """Set what standardises inputs and outputs."""
        self.mean.copy_(hidden.mean(0))
        self.deviation.copy_(hidden.std(0, correction=0).clamp_min(1e-6))
        self.unit.copy_(remaining.mean().clamp_min(1.0))
        # Training starts from the mean length rather than from about nothing.
        nn.init.ones_(self.layers[-1].bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Predictions in tokens; may be below 0."""
        x = (hidden - self.mean) / self.deviation
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)[:, 0] * self.unit
