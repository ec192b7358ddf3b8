"""Rows A8 to A11: about the predictor and the hardware, which a cluster simulation does not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from experiments.claims.ares.cluster import PROFILE
from experiments.claims.ares.rows import A8, A9, A10, A11
from experiments.claims.base import Experiment, Figures, Finding, Verdict
from tailrace.profiles import load_profile

# Requests in a batch at half-full KV: 222,000 / 2 tokens at 5,500 per request on average.
_BATCH: Final = 20


def judge(_: Mapping[str, Figures]) -> Sequence[Finding]:
    """Report what the profile says about A8; the rest needs the model."""
    profile = load_profile(PROFILE)
    step_ms = profile.step_ms(0.0, _BATCH, profile.kv_capacity_tokens // 2)
    return (
        Finding(
            A8.claim_id,
            f"step {step_ms:.1f} ms by our profile",
            Verdict.NEEDS_GPU,
            "the predictor's latency is a GPU's; 1.40 / 18.23 = 7.68% and a 20th of it are consistent",
            {"step_ms": step_ms},
        ),
        Finding(
            A9.claim_id,
            "-",
            Verdict.INPUT,
            "a MAE of our own needs the model's hidden states; the simulated predictor has this one",
        ),
        Finding(
            A10.claim_id,
            "-",
            Verdict.INPUT,
            "our own errors need the model's hidden states; the simulated predictor has these",
        ),
        Finding(
            A11.claim_id,
            "-",
            Verdict.NOT_REPRODUCIBLE,
            "the length of the migrated request is not given, and its KV over 10 Gbit/s determines the share",
        ),
    )


PREDICTOR: Final = Experiment("ares-predictor", (A8, A9, A10, A11), (), judge)
