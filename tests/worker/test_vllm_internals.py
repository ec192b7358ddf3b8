"""The list of vLLM internals used by the worker is complete, and the installed vLLM has them."""

from __future__ import annotations

import ast
import asyncio
import builtins
import concurrent.futures
import importlib
import logging
import multiprocessing.process
import queue
import threading
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

import numpy as np
import torch

import worker_agent.engine.vllm as package
from tailrace.foreign_names import missing, names
from worker_agent.engine.vllm import internals
from worker_agent.engines import make_engine
from worker_agent.settings import EngineOptionError, EngineOptions

pytestmark = pytest.mark.vllm

FOLDER = Path(package.__path__[0])
ROOT = FOLDER.parents[2]
LISTS = (
    *(internals.INTERNALS, internals.WAITING, internals.WAITING_030, internals.RUNNER_V2),
    *(internals.MULTI, internals.OFFLOADING, internals.DATA_PARALLEL),
)

# Attributes of objects of other packages that these modules use.
OTHERS = (
    *(value for value in vars(builtins).values() if isinstance(value, type)),
    *(Counter, deque, Path, np.ndarray, torch.Tensor, torch.Generator, torch.nn.Module, torch.device),
    *(threading.Thread, queue.Queue, queue.SimpleQueue, logging.Logger, concurrent.futures.Future),
    *(
        asyncio.AbstractEventLoop,
        multiprocessing.process.BaseProcess,
        torch.cuda.Stream,
        torch.Event,
        torch.UntypedStorage,
    ),
)
OF_OTHERS = {name for each in OTHERS for name in dir(each)} | {
    # From hashlib, xxhash, and a transformers configuration.
    *("hexdigest", "digest", "intdigest", "to_dict"),
}


def test_installed_vllm_has_all_listed_names() -> None:
    internals.require_internals()


def test_all_imports_from_vllm_are_listed() -> None:
    listed = {(module, name) for uses in LISTS for module, text in uses.items() for name in names({"": text})}
    imported = {
        (node.module, alias.name)
        for tree in _trees(FOLDER)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    assert imported - listed == set()


def test_all_used_attributes_of_vllm_objects_are_listed() -> None:
    """Compared by name: a name that our own code defines as well is not detected."""
    known = OF_OTHERS | set(_own_names()) | {name for uses in LISTS for name in names(uses)}
    unlisted = {
        f"{node.attr} in {path.name}"
        for path in FOLDER.glob("*.py")
        for tree in [ast.parse(path.read_text())]
        for modules in [_modules(tree)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _root(node) not in modules and node.attr not in known
    }
    assert unlisted == set()


def test_version_without_a_listed_name_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.v1.core.block_pool.BlockPool.touch")
    with pytest.raises(EngineOptionError) as refused:
        make_engine(EngineOptions("vllm"))
    line = str(refused.value)
    assert "vllm.v1.core.block_pool:BlockPool.touch;" in line
    assert "\n" not in line


def test_statements_about_model_runner_v2_hold_where_it_imports() -> None:
    pytest.importorskip("triton")
    try:
        importlib.import_module("vllm.v1.worker.gpu.model_runner")
    except ImportError as error:
        pytest.skip(f"it does not import here: {error}")
    assert missing(internals.RUNNER_V2) == []


def _trees(folder: Path) -> Iterator[ast.Module]:
    return (ast.parse(path.read_text()) for path in sorted(folder.glob("*.py")))


def _own_names() -> Iterator[str]:
    """Yield all names that the worker and the library define."""
    folders = [ROOT / "worker_agent", ROOT / "tailrace"]
    for node in (
        node
        for folder in folders
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    ):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.AnnAssign(target=ast.Attribute(attr=name)):
                yield name
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)]):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name


def _modules(tree: ast.Module) -> set[str]:
    """Return the names by which a module refers to modules other than vLLM's."""
    return {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }


def _root(node: ast.Attribute) -> str:
    value: ast.expr = node
    while isinstance(value, ast.Attribute | ast.Call):
        value = value.func if isinstance(value, ast.Call) else value.value
    return value.id if isinstance(value, ast.Name) else ""
