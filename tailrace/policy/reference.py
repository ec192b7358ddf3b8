"""docs/policy-parameters.md, from the declarations.

python -m tailrace.policy.reference > docs/policy-parameters.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tailrace.intra.base import ENGINE_ORDER
from tailrace.intra.registry import intra_parameters
from tailrace.policy.base import Variant
from tailrace.policy.parameters import Parameter, format_value
from tailrace.policy.registry import declared_parameters, names, variant
from tailrace.slo import OBJECTIVES

_INTRODUCTION: Final = """\
# Parameters of policies

This page is written by `python -m tailrace.policy.reference` from what the classes declare; a test holds
the two equal.

    tailrace set policy pascal quantum_tokens=250 demotion_tokens=4000   # a running cluster
    tailrace get policies -o json                                        # all of them, and what is in force
    tailrace simulate pascal r1 --rate 10 --set quantum_tokens=250
    tailrace compare pascal arrow --workload r1 --rate 10 --set pascal:quantum_tokens=250

A policy and its parameters are set at once: one that is not named is at its default. "batch order" marks
a parameter of the order inside each instance ([intra.md](intra.md)), which workers take from the same
record.

## Service-level objectives

Not a policy's but the deployment's: `tailrace set slo ttft=2 tpot=0.15 qoe=0.95`, in the simulator
`--slo-ttft` and so on. Arrow and `tailrace` plan for TTFT and TPOT, PASCAL for the pace: an answer that is
behind it makes its instance fail.
"""


def reference() -> str:
    """The page."""
    parts = [_INTRODUCTION, *_table(OBJECTIVES, ())]
    ours = {name: found for name in names() if _is_ours(found := variant(name))}
    plain: list[str] = []
    for name, found in ours.items():
        kind = found.policy
        parameters = declared_parameters(kind, kind.batch_order)
        if found.parameters:
            continue
        if not parameters:
            plain.append(name)
            continue
        parts += ["", f"## `{name}`", ""]
        if kind.baseline_of:
            parts += [f"A baseline of `{kind.baseline_of}`.", ""]
        if kind.batch_order != ENGINE_ORDER:
            parts += [f"Batch order: `{kind.batch_order}`.", ""]
        parts += _table(parameters, {p.name for p in intra_parameters(kind.batch_order)})
        variants = [(other, of) for other, of in ours.items() if of.policy is kind and of.parameters]
        if variants:
            parts += ["", "| name | stands for |", "|---|---|"]
        for other, of in variants:
            words = " ".join(f"{key}={format_value(value)}" for key, value in of.parameters.items())
            parts.append(f"| `{other}` | `{name} {words}` |")
    parts += ["", "## Without parameters", "", ", ".join(f"`{name}`" for name in plain) + "."]
    return "\n".join(parts) + "\n"


def _is_ours(found: Variant) -> bool:
    return found.policy.__module__.startswith("tailrace.")


def _table(parameters: Sequence[Parameter], of_order: Iterable[str]) -> list[str]:
    order = frozenset(of_order)
    rows = ["| parameter | type | default | unit | what | default from |", "|---|---|---|---|---|---|"]
    for p in parameters:
        what = f"{p.description}; batch order" if p.name in order else p.description
        allowed = p.allowed.removeprefix("an integer").removeprefix("a number").strip()
        kind = f"{p.type_name} {allowed}" if allowed and p.type is not bool else p.type_name
        rows.append(f"| `{p.name}` | {kind} | `{format_value(p.default)}` | {p.unit} | {what} | {p.source} |")
    return rows


if __name__ == "__main__":
    print(reference(), end="")
