"""Remaining length as a time to an event, with a constant hazard in each of several bins of tokens.

With hazard h_k per token in bin k, a request makes more than t tokens with probability exp(-H(t)), H being
the integral of the hazard up to t. One that ended after t tokens has density h(t) exp(-H(t)); one that was
cut off after t tokens is known to be longer, and has only exp(-H(t)): so the likelihood takes both as they
are (piecewise exponential model; as a network's output: Kvamme and Borgan, arXiv 1910.06724).

Tensors: `hazards` (n, bins) per token; `edges` (bins + 1), from 0; `tokens` (n,).
"""

from __future__ import annotations

import math
from typing import Final

import torch

BINS: Final = 32
# The first bin ends at the longest length over this, if that is a token or more.
_RANGE: Final = 4096.0
# A hazard is never 0: its logarithm is taken.
_LEAST: Final = 1e-12


def edges_for(longest: float, bins: int = BINS) -> torch.Tensor:
    """Bins that widen in proportion to the length, up to `longest` tokens (at least 2)."""
    longest = max(2.0, longest)
    first = max(1.0, longest / _RANGE)
    inner = torch.logspace(math.log10(first), math.log10(longest), bins, dtype=torch.float64)
    return torch.cat((torch.zeros(1, dtype=torch.float64), inner)).float()


def cumulative(hazards: torch.Tensor, edges: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """H(tokens), (n,). Beyond the last edge the hazard is taken to be 0."""
    inside = (tokens[:, None] - edges[:-1]).clamp_min(0.0).minimum(edges[1:] - edges[:-1])
    return (hazards * inside).sum(1)


def negative_log_likelihood(
    hazards: torch.Tensor, edges: torch.Tensor, tokens: torch.Tensor, ended: torch.Tensor
) -> torch.Tensor:
    """Of each sample, (n,). `ended`: whether the request ended after `tokens`, or was cut off there."""
    bins = torch.bucketize(tokens, edges[1:-1])
    at_end = hazards.gather(1, bins[:, None])[:, 0].clamp_min(_LEAST).log()
    return cumulative(hazards, edges, tokens) - torch.where(ended, at_end, torch.zeros_like(at_end))


def quantile(
    hazards: torch.Tensor, edges: torch.Tensor, level: float, after: torch.Tensor | None = None
) -> torch.Tensor:
    """Tokens within which a share `level` of such requests have ended, (n,); no more than the last edge.

    `after` (n,): of those that have made so many tokens, how many more.
    """
    widths = edges[1:] - edges[:-1]
    in_bin = hazards * widths
    before = in_bin.cumsum(1) - in_bin
    wanted = torch.full_like(before[:, :1], -math.log1p(-level))
    if after is not None:
        wanted += cumulative(hazards, edges, after)[:, None]
    # The part of each bin that lies below the quantile: all of those before its own, none of those after.
    parts = ((wanted - before) / in_bin.clamp_min(_LEAST)).clamp(0.0, 1.0)
    tokens = parts @ widths
    return tokens if after is None else (tokens - after).clamp_min(0.0)
