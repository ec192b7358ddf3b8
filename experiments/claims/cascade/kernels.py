"""C14, C15: the cost of attention in a decode step (sections 2.2 and 2.3), from the profile alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from experiments.claims.base import Claim, Experiment, Figures, Finding, Run
from experiments.claims.verdicts import judge_value, judged, numbers, weakest
from tailrace.perf.length_penalty import load_length_penalty
from tailrace.profiles import Profile, load_profile

C14 = Claim(
    "C14",
    "CascadeInfer",
    "Fig. 2",
    "decode step of unequal lengths over equal ones, same tokens, batch of 512, Llama-3.2-3B, H100",
    "1.1-2.1x",
)
C15 = Claim(
    "C15",
    "CascadeInfer",
    "section 2.2",
    "attention's share of a decode step: 1,000 tokens x 250; 200 tokens x 500; one request",
    "81%; 62%; 14%",
)
_PROFILE: Final = "llama-3.2-3b-h100"
_NAME: Final = "cascade-kernels"
_BATCH: Final = 512
_PENALTIES: Final = ("measured-rtx4090", "measured-rtx-pro-6000")
# Requests, tokens each, the paper's share.
_SHARES: Final = ((250, 1_000, 0.81), (500, 200, 0.62), (1, 1_000, 0.14))


def kernels() -> Experiment:
    """Return the experiment, which needs no simulation."""
    return Experiment(_NAME, (C14, C15), (Run(f"{_NAME}/all", steps, (), 0.5),), judge)


def batches() -> dict[str, NDArray[np.int64]]:
    """Return three batches of 512 with similar total tokens that fit on the H100: alike, spread, and dwarfed
    by one request."""
    each = 800
    alike = np.linspace(0.9 * each, 1.1 * each, _BATCH)
    spread = np.geomspace(each / 20, each * 4, _BATCH)
    dwarfed = np.full(_BATCH, 600.0)
    dwarfed[-1] = _BATCH * each - dwarfed[:-1].sum()
    scaled = {"alike": alike, "spread": spread * (_BATCH * each / spread.sum()), "dwarfed": dwarfed}
    return {name: lengths.astype(np.int64) for name, lengths in scaled.items()}


def steps() -> Figures:
    """Compute the slowdown of a step by the measured penalties, and attention's share by the profile."""
    profile = load_profile(_PROFILE)
    figures: dict[str, float | Sequence[float]] = {}
    for name, lengths in batches().items():
        figures[name] = [_slow_down(profile, lengths, penalty) for penalty in _PENALTIES]
    figures["shares"] = [_attention_share(profile, requests, tokens) for requests, tokens, _ in _SHARES]
    return figures


def _slow_down(profile: Profile, lengths: NDArray[np.int64], penalty: str) -> float:
    loaded = load_length_penalty(penalty)
    assert loaded is not None
    decode = profile.decode
    attention_ms = decode.ms_per_kv_token * float(lengths.sum())
    rest_ms = decode.base_ms + decode.ms_per_request * len(lengths)
    unequal_ms = loaded.step_factor(lengths) * (rest_ms + loaded.attention_factor(lengths) * attention_ms)
    return unequal_ms / (rest_ms + attention_ms)


def _attention_share(profile: Profile, requests: int, tokens: int) -> float:
    return (
        profile.decode.ms_per_kv_token * requests * tokens / profile.step_ms(0.0, requests, requests * tokens)
    )


def judge(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """Judge C14 by the largest slowdown, C15 by each share."""
    return (*judged((C14,), _slowdowns, figures), *judged((C15,), _shares, figures))


def _slowdowns(figures: Mapping[str, Figures]) -> Finding:
    ours = figures[f"{_NAME}/all"]
    factors = [factor for name in batches() for factor in numbers(ours, name)]
    least, most = min(factors), max(factors)
    return Finding(
        C14.claim_id,
        f"{least:.2f}-{most:.2f}x",
        judge_value(most - 1.0, 1.1),
        "from published measurements of one newer attention kernel; figure 2 uses others, and the text "
        "does not give its axis. Its range is a separate penalty, used for C1 to C13",
        {"factors": factors},
    )


def _shares(figures: Mapping[str, Figures]) -> Finding:
    shares = numbers(figures[f"{_NAME}/all"], "shares")
    return Finding(
        C15.claim_id,
        "; ".join(f"{share:.0%}" for share in shares),
        weakest(judge_value(share, paper) for share, (*_, paper) in zip(shares, _SHARES, strict=True)),
        "by the part of the fitted step time that grows with KV; the profile is of a newer engine with "
        "other kernels and overheads, and one request's attention is inside its base",
        {"shares": shares},
    )
