"""Mutations of a module: one small change each, like a programmer's mistake."""

from __future__ import annotations

import difflib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

# Comparisons reversed or off by one, constants off by one, `and` for `or`, signs. Not included: mutations
# without effect (`==` for `is`, `|` in annotations), and those that no behavioural test notices (decorators).
_OPERATORS: Final = (
    *(
        f"core/ReplaceComparisonOperator_{before}_{after}"
        for before, after in (
            ("Lt", "LtE"),
            ("LtE", "Lt"),
            ("Gt", "GtE"),
            ("GtE", "Gt"),
            ("Lt", "Gt"),
            ("Gt", "Lt"),
            ("LtE", "GtE"),
            ("GtE", "LtE"),
            ("Eq", "NotEq"),
            ("NotEq", "Eq"),
            ("Is", "IsNot"),
            ("IsNot", "Is"),
        )
    ),
    *(
        f"core/ReplaceBinaryOperator_{before}_{after}"
        for before, after in (
            ("Add", "Sub"),
            ("Sub", "Add"),
            ("Mul", "Div"),
            ("Div", "Mul"),
            ("FloorDiv", "Mul"),
        )
    ),
    "core/NumberReplacer",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/AddNot",
    "core/ReplaceBreakWithContinue",
    "core/ReplaceContinueWithBreak",
    "core/ZeroIterationForLoop",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one change. `before` and `after` are the changed lines, without their indentation."""

    module: str
    line: int
    before: str
    after: str
    code: str


def mutants_of(root: Path, module: str, count: int, seed: int) -> Sequence[Mutant]:
    """Draw `count` mutants of `module` by `seed`; fewer if it has no more."""
    source = (root / module).read_text()
    positions = [
        (name, occurrence) for name in _OPERATORS for occurrence in range(_occurrences(source, name))
    ]
    random.Random(f"{seed} {module}").shuffle(positions)
    mutants: list[Mutant] = []
    for name, occurrence in positions:
        if len(mutants) == count:
            break
        mutant = _mutant(module, source, name, occurrence)
        if mutant is not None:
            mutants.append(mutant)
    return mutants


def _occurrences(source: str, name: str) -> int:
    operator = cosmic_ray.plugins.get_operator(name)()
    return sum(1 for node in ast_nodes(get_ast(source)) for _ in operator.mutation_positions(node))


def _mutant(module: str, source: str, name: str, occurrence: int) -> Mutant | None:
    """Return the mutant; None if there is none."""
    code = mutate_code(source, cosmic_ray.plugins.get_operator(name)(), occurrence)
    if code is None or code == source:
        return None
    changed = [
        line
        for line in difflib.unified_diff(source.splitlines(), code.splitlines(), lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    before = " ".join(line[1:].strip() for line in changed if line.startswith("-"))
    if before.startswith(("@", "*,")):
        # A decorator, or the marker of keyword-only arguments.
        return None
    after = " ".join(line[1:].strip() for line in changed if line.startswith("+"))
    lines = source.splitlines()
    first = next((n for n, (a, b) in enumerate(zip(lines, code.splitlines(), strict=False), 1) if a != b), 1)
    return Mutant(module, first, before, after, code)
