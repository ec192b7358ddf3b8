"""vLLM's Model Runner V2 without a GPU. For tests alone: slow.

V2 is written in Triton. vLLM's CPU build believes in Triton when there is a backend called "cpu" whose driver
is active; Triton's interpreter runs kernels on tensors of the CPU and needs none. So a backend in name is all
that is missing.

For each kernel, and for each function that a kernel calls, the interpreter puts its own functions in the
place of Triton's language; it checks each sum for overflow, which no compiled kernel does; and it asks for
the same types over and over. That is half of a small model's step. Here its functions are put there once for
each module with kernels, and stay (in such a process nothing else compiles Triton), sums are not checked, and
types are remembered.
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
    """Only ever asked whether it is there."""

    @staticmethod
    def is_active() -> bool:
        """It is."""
        return True


def is_asked_for() -> bool:
    """Whether this process inherits it from one that called `use_model_runner_v2`."""
    return os.environ.get(_V2) == "1"


def use_model_runner_v2() -> None:
    """Call before vLLM or Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ[_V2] = "1"
    from triton import backends  # type: ignore[import-untyped]

    given = backends.backends["nvidia"]
    backends.backends["cpu"] = type(given)(given.compiler, _Driver)
    _hurry()
    _add_log1p()


def _hurry() -> None:
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    interpreter._patch_lang = _once_for_each_module(interpreter._patch_lang, interpreter._LangPatchScope())
    interpreter._get_np_dtype = _remembering(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _add_log1p() -> None:
    """The interpreter has no functions of CUDA's libdevice; vLLM 0.30's sampler needs this one."""
    import numpy
    from triton.language import core  # type: ignore[import-untyped]
    from triton.language.extra import libdevice  # type: ignore[import-untyped]
    from triton.runtime import interpreter

    def log1p(value: Any) -> object:
        handle = interpreter.TensorHandle(numpy.log1p(value.handle.data), value.handle.dtype)
        return core.tensor(handle, value.type)

    libdevice.log1p = log1p


def _once_for_each_module(
    patch: Callable[[FunctionType], object], nothing_to_restore: object
) -> Callable[[FunctionType], object]:
    patched: set[int] = set()

    def patch_once(fn: FunctionType) -> object:
        module = id(fn.__globals__)
        if module not in patched:
            patch(fn)
            patched.add(module)
        return nothing_to_restore

    return patch_once


def _remembering(numpys: Callable[[Any], object]) -> Callable[[Any], object]:
    """numpys: numpy's type for one of Triton's, which is the same for a block and its elements."""
    known = functools.cache(numpys)

    def type_of(asked: Any) -> object:
        element = asked.scalar
        # Pointers have no hash, and a short way of their own.
        return numpys(element) if element.is_ptr() else known(element)

    return type_of
