"""The predictor's network: the 4-layer MLP with ReLU of ARES, section 4.2, Eq. (2), with hazards as
outputs."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from tailrace.predictor.hazards import BINS, edges_for

PAPER_WIDTHS: Final = (2048, 512, 64)
"""The widths that the paper uses for a hidden size of 3,584."""


def widths_for(hidden_size: int) -> tuple[int, int, int]:
    """Return the paper's widths in proportion to the hidden size, as multiples of 32, at least 64."""
    first, second, third = (
        min(width, max(64, round(width * hidden_size / 3584 / 32) * 32)) for width in PAPER_WIDTHS
    )
    return first, second, third


class HazardMlp(nn.Module):  # type: ignore[misc]
    """Map states (n, d) to the hazard per token of each bin, (n, bins); see `hazards`.

    Beyond the paper's equation, it has biases, inputs standardized by the training samples' mean and
    deviation, and one output per bin where the paper predicts the length.
    """

    def __init__(self, hidden_size: int, widths: tuple[int, int, int], bins: int = BINS) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(hidden_size))
        self.register_buffer("deviation", torch.ones(hidden_size))
        self.register_buffer("edges", edges_for(2.0, bins))
        sizes = (hidden_size, *widths, bins)
        self.layers = nn.ModuleList(nn.Linear(sizes[i], sizes[i + 1]) for i in range(4))

    def fit_inputs(self, hidden: torch.Tensor, remaining: torch.Tensor, ended: torch.Tensor) -> None:
        """Fit input standardization and bins to the samples, and start from their mean hazard in every
        bin."""
        self.mean.copy_(hidden.mean(0))
        self.deviation.copy_(hidden.std(0, correction=0).clamp_min(1e-6))
        self.edges.copy_(edges_for(float(remaining.max()), len(self.edges) - 1))
        per_token = ended.sum().clamp_min(1) / remaining.sum().clamp_min(1.0)
        # The inverse of softplus, so that the bias alone gives this hazard in each bin.
        in_bin = per_token * (self.edges[1:] - self.edges[:-1])
        with torch.no_grad():
            self.layers[-1].bias.copy_(in_bin + (-(-in_bin).expm1()).log())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hazards per token, (n, bins)."""
        x = (hidden - self.mean) / self.deviation
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return nn.functional.softplus(self.layers[-1](x)) / (self.edges[1:] - self.edges[:-1])
