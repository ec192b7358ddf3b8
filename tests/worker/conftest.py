"""Fixtures of the tests that start vLLM engines in this process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from tests.worker.vllm_front import Front, Stream
    from worker_agent.engine.vllm.engine import VllmEngine


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests of vLLM's engine that also run with async scheduling, its default, to `make soak`."""

    def of(file: str) -> list[pytest.Function]:
        return [item for item in items if isinstance(item, pytest.Function) and item.path.name == file]

    again = {item.originalname for item in of("test_vllm_async.py")}
    for item in of("test_vllm_engine.py"):
        # Those with cases run a part of them with each.
        if item.originalname in again and "case" not in item.fixturenames:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def engine(started: tuple[VllmEngine, Front, *tuple[object, ...]]) -> VllmEngine:
    """Return the engine of the module's `started`."""
    return started[0]


@pytest.fixture
def front(started: tuple[VllmEngine, Front, *tuple[object, ...]]) -> Front:
    """Return the front end of the module's `started`."""
    return started[1]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Stream]:
    """The results of `reference` in this module so far."""
    return {}


@pytest_asyncio.fixture(loop_scope="module")
async def reference(
    request: pytest.FixtureRequest,
    engine: VllmEngine,
    front: Front,
    case: tuple[list[int], SamplingParams],
    undisturbed: dict[str, Stream],
) -> Stream:
    """Return the stream of the module's `case` without disturbance, run once for all tests of a module."""
    name: str = request.node.callspec.params["case"]
    if name not in undisturbed:
        undisturbed[name] = await front.run(engine, *case)
    return undisturbed[name]


@pytest.fixture(scope="module", autouse=True)
def plain_llvmlite() -> None:
    """Let an engine start after another test has imported numba, as n-gram speculation does.

    At its start, vLLM reads the `__dict__` of every attribute of every imported module. llvmlite's wrapper of
    its library returns a function for it, and vLLM fails. A worker process is not affected, because it starts
    its only engine before that.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None or "tailrace_plain" in vars(ffi._lib_wrapper):
        return
    wrapped = ffi._lib_wrapper.__getattr__

    def get(library: object, name: str) -> object:
        if name == "__dict__":
            raise AttributeError(name)
        return wrapped(library, name)

    ffi._lib_wrapper.__getattr__ = get
    ffi._lib_wrapper.tailrace_plain = True
