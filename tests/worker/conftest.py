"""What tests that start vLLM engines in one process have to mend between them."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def plain_llvmlite() -> None:
    """Let an engine start after another test has imported numba, as n-gram speculation does.

    When it starts, vLLM asks every attribute of every imported module for its `__dict__`. llvmlite's wrapper
    of its library answers with a function of that name, and vLLM fails. A worker process starts one
    engine, before that.
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
