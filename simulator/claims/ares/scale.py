"""Rows A6 and A7: 8 to 256 instances, a quarter of them for prefill, 25 Gbit/s, true lengths.

0.3 RPS for 8 instances, six of which decode, is 0.88 of what RPS 0.17 is for three: so the load is 0.88 of
serving.HIGH_LOAD, the same for all sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from simulator.claims.ares.measure import serve_at_load
from simulator.claims.ares.rows import A6, A7
from simulator.claims.ares.serving import HIGH_LOAD, SHAREGPT
from simulator.claims.base import Experiment, Figures, Finding, Run
from simulator.claims.figures import number
from simulator.claims.verdicts import of_bound, of_ordering

SIZES: Final = (8, 16, 32, 64, 128, 256)
SPAN_S: Final = 750.0
_LOAD: Final = HIGH_LOAD * (0.3 / 6) / (0.17 / 3)
_ARMS: Final = ("vllm", "rescheduling", "ares_oracle")
_SEED: Final = 1


def _name(size: int, arm: str) -> str:
    return f"scale/{size}/{arm}"


def _runs() -> tuple[Run, ...]:
    return tuple(
        Run(_name(size, arm), serve_at_load, (SHAREGPT, arm, size, _LOAD, SPAN_S, _SEED), 0.15 * size)
        for size in SIZES
        for arm in _ARMS
    )


def judge(figures: Mapping[str, Figures]) -> Sequence[Finding]:
    """A6 and A7."""
    held: list[bool] = []
    parts: list[str] = []
    out: dict[str, float] = {}
    for size in SIZES:
        vllm, moved, oracle = (number(figures[_name(size, arm)], "variance_ms2") for arm in _ARMS)
        held += [vllm > moved, moved > oracle]
        parts.append(
            f"{vllm:.1f} > {moved:.2f} > {oracle:.2f}"
            if held[-1]
            else f"{vllm:.1f} > {moved:.2f} < {oracle:.2f}"
        )
        out |= {f"{arm}_{size}": v for arm, v in zip(_ARMS, (vllm, moved, oracle), strict=True)}
    first = Finding(
        A6.claim_id,
        "; ".join(f"{size}: {part}" for size, part in zip(SIZES, parts, strict=True)),
        of_ordering(held),
        "rescheduling takes nine tenths and more of vLLM's variance; predictions take no more: a look each "
        "second keeps present loads together, and equation 4 gives up a little of that for the horizon's",
        out,
    )
    mean_ms, max_ms = (
        number(figures[_name(256, "ares_oracle")], f"tick_{name}_ms") for name in ("mean", "max")
    )
    second = Finding(
        A7.claim_id,
        f"mean {mean_ms:.0f} ms, longest {max_ms:.0f} ms",
        of_bound(mean_ms, 300.0, 600.0),
        "targets and sources that cannot win are not looked at; time here includes making the "
        "simulator's views",
        {"mean_ms": mean_ms, "max_ms": max_ms},
    )
    return first, second


SCALE: Final = Experiment("ares-scale", (A6, A7), _runs(), judge)
