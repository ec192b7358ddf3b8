"""The import graph of the repository's packages, including type-only imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


def import_graph(root: Path, packages: Sequence[str]) -> dict[str, set[str]]:
    """Return, for each module of these packages under `root`, the modules among them that it imports.

    Every import statement counts, including those in functions and under `if TYPE_CHECKING`.
    """
    files = {
        _module(path.relative_to(root)): path
        for package in packages
        for path in (root / package).rglob("*.py")
    }
    return {module: set(_imported(path, module, files.keys())) - {module} for module, path in files.items()}


def find_cycle(graph: Mapping[str, Set[str]]) -> list[str]:
    """Return an import cycle, with the first module repeated at its end, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        # The error lists imported modules before importing ones.
        return found[::-1]
    return []


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, module: str, known: Set[str]) -> Iterator[str]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                # `from package import module` needs the module, and `from module import name` this module.
                target = submodule if submodule in known else base
                if target in known:
                    yield target


def _base(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)
