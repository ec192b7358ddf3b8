"""C6, C7, C16: claims that are not checked, and why."""

from __future__ import annotations

from experiments.claims.base import Claim, Experiment
from experiments.claims.verdicts import not_reproducible

_L40 = Claim(
    "C6", "CascadeInfer", "figures 9a, 11a", "L40: latency; throughput", "-45..67%; 1.37x, 1.21x, 1.34x"
)
_TP = Claim(
    "C7",
    "CascadeInfer",
    "figures 9b, 11b",
    "Llama-3.1-70B over TP2, TP4: latency; throughput",
    "-27..65%, -49..64%; 1.31-2.53x, 2.89-4.16x",
)
_ENGINE = Claim("C16", "CascadeInfer", "Fig. 8", "one instance: Llumnix's engine over vLLM's", "22-81%")


def not_checked() -> Experiment:
    """Return the rows, which need no runs."""
    reasons = {
        "C6": "the paper does not state the models on the L40, and one of three baselines is another engine "
        "(SGLang); the comparison with vLLM and Llumnix is C1 to C5",
        "C7": "figure 2's penalty is of one GPU; that of tensor parallel kernels is not known",
        "C16": "compares engines, not schedulers: the simulator has one engine",
    }
    return Experiment("cascade-elsewhere", (_L40, _TP, _ENGINE), (), not_reproducible(reasons))
