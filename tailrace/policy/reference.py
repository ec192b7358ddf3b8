"""docs/policy-parameters.md, from the declarations.

python -m tailrace.policy.reference > docs/policy-parameters.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tailrace.intra.registry import ENGINE_ORDER, intra_for_policy, intra_parameters
from tailrace.policy.parameters import Parameter, format_value
from tailrace.policy.registry import names, parameters_of, policy_class
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
    groups: dict[tuple[str, tuple[Parameter, ...]], list[str]] = {}
    for name in (name for name in names() if policy_class(name).__module__.startswith("tailrace.")):
        groups.setdefault((intra_for_policy(name), parameters_of(name)), []).append(name)
    plain = [name for (_, parameters), members in groups.items() if not parameters for name in members]
    for (order, parameters), members in groups.items():
        if parameters:
            parts += ["", f"## {', '.join(f'`{name}`' for name in members)}", ""]
            if order != ENGINE_ORDER:
                parts += [f"Batch order: `{order}`.", ""]
            parts += _table(parameters, {p.name for p in intra_parameters(order)})
    parts += ["", "## Without parameters", "", ", ".join(f"`{name}`" for name in plain) + "."]
    return "\n".join(parts) + "\n"


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
