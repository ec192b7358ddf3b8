"""vLLM's Model Runner V2 without a GPU. Slow: only for tests.

V2 is written in Triton. vLLM's CPU build uses Triton if there is a backend called "cpu" whose driver is
active;
Triton's interpreter runs kernels on CPU tensors without a backend. So only a backend by that name is missing.

For each kernel, and for each function that a kernel calls, the interpreter replaces Triton's language by its
own functions; it checks each sum for overflow, which no compiled kernel does; and it looks up the same types
over and over. That is half of a small model's step. Here its functions are installed once per module with
kernels, and stay (such a process compiles no Triton), sums are not checked, and types are cached.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

_V2: Final = "VLLM_USE_V2_MODEL_RUNNER"


class _Driver:
    """A driver that only reports to be active."""

    @staticmethod
    def is_active() -> bool:
        """Return True."""
        return True


def is_requested() -> bool:
    """Return whether a parent process has called `use_model_runner_v2`."""
    return os.environ.get(_V2) == "1"


def use_model_runner_v2() -> None:
    """Select Model Runner V2. Call this before vLLM or Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ[_V2] = "1"
    from triton import backends  # type: ignore[import-untyped]

    nvidia = backends.backends["nvidia"]
    backends.backends["cpu"] = type(nvidia)(nvidia.compiler, _Driver)
    _speed_up()
    _add_log1p()


def _speed_up() -> None:
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    interpreter._patch_lang = _patch_each_module_once(interpreter._patch_lang, interpreter._LangPatchScope())
    interpreter._get_np_dtype = _cached(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _add_log1p() -> None:
    """Define libdevice's log1p: the interpreter has no functions of libdevice, and vLLM 0.30's sampler needs
    it."""
    import numpy
    from triton.language import core  # type: ignore[import-untyped]
    from triton.language.extra import libdevice  # type: ignore[import-untyped]
    from triton.runtime import interpreter

    def log1p(value: Any) -> object:
        handle = interpreter.TensorHandle(numpy.log1p(value.handle.data), value.handle.dtype)
        return core.tensor(handle, value.type)

    libdevice.log1p = log1p


def _patch_each_module_once(
    patch: Callable[[FunctionType], object], scope: object
) -> Callable[[FunctionType], object]:
    patched: set[int] = set()

    def patch_once(fn: FunctionType) -> object:
        module = id(fn.__globals__)
        if module not in patched:
            patch(fn)
            patched.add(module)
        return scope

    return patch_once


def _cached(numpy_type: Callable[[Any], object]) -> Callable[[Any], object]:
    """Cache `numpy_type`, which returns NumPy's type for one of Triton's: that of a block is its
    elements'."""
    cached = functools.cache(numpy_type)

    def cached_numpy_type(triton_type: Any) -> object:
        element = triton_type.scalar
        # Pointers are not hashable, and quick to convert.
        return numpy_type(element) if element.is_ptr() else cached(element)

    return cached_numpy_type
