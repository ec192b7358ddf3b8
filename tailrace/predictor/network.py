"""The predictor's network: the 4-layer MLP with ReLU of ARES, section 4.2, Eq. (2), with hazards as
outputs."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn

# Model the remaining length as a time to an event, with a constant hazard in each of several bins of tokens.
#
# With hazard h_k per token in bin k, a request generates more than t tokens with probability exp(-H(t)),
# where H is the integral of the hazard up to t. A request that ended after t tokens has density h(t)
# exp(-H(t)); one that was truncated after t tokens is known to be longer, and contributes only exp(-H(t)). So
# the likelihood uses both kinds as they are (piecewise exponential model; as a network's output: Kvamme and
# Borgan, arXiv 1910.06724).
#
# Tensors: `hazards` (n, bins) per token; `edges` (bins + 1), from 0; `tokens` (n,).

BINS: Final = 32
# The first bin ends at the longest length divided by this, but at one token at least.
_RANGE: Final = 4096.0
# A lower bound, because the logarithm of a hazard is taken.
_LEAST: Final = 1e-12


def edges_for(longest: float, bins: int = BINS) -> torch.Tensor:
    """Return the edges of bins that widen in proportion to the length, up to `longest` tokens (at least
    2)."""
    longest = max(2.0, longest)
    first = max(1.0, longest / _RANGE)
    inner = torch.logspace(math.log10(first), math.log10(longest), bins, dtype=torch.float64)
    return torch.cat((torch.zeros(1, dtype=torch.float64), inner)).float()


def cumulative(hazards: torch.Tensor, edges: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cumulative hazard H(tokens), (n,). The hazard beyond the last edge is 0."""
    inside = (tokens[:, None] - edges[:-1]).clamp_min(0.0).minimum(edges[1:] - edges[:-1])
    return (hazards * inside).sum(1)


def negative_log_likelihood(
    hazards: torch.Tensor, edges: torch.Tensor, tokens: torch.Tensor, ended: torch.Tensor
) -> torch.Tensor:
    """Return the negative log-likelihood of each sample, (n,).

    `ended`: whether the request ended after `tokens`, or was truncated there.
    """
    bins = torch.bucketize(tokens, edges[1:-1])
    at_end = hazards.gather(1, bins[:, None])[:, 0].clamp_min(_LEAST).log()
    return cumulative(hazards, edges, tokens) - torch.where(ended, at_end, torch.zeros_like(at_end))


def quantile(
    hazards: torch.Tensor, edges: torch.Tensor, level: float, after: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the tokens within which a share `level` of such requests has ended, (n,); at most the last edge.

    With `after` (n,), tokens generated so far: return how many more tokens, for requests that have generated
    so many.
    """
    widths = edges[1:] - edges[:-1]
    in_bin = hazards * widths
    before = in_bin.cumsum(1) - in_bin
    target = torch.full_like(before[:, :1], -math.log1p(-level))
    if after is not None:
        target += cumulative(hazards, edges, after)[:, None]
    # The share of each bin below the quantile: all of the bins before its own, none of those after.
    shares = ((target - before) / in_bin.clamp_min(_LEAST)).clamp(0.0, 1.0)
    tokens = shares @ widths
    return tokens if after is None else (tokens - after).clamp_min(0.0)


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
