"""Tell whether torch is compiling in this process.

vLLM compiles some functions when a request first needs them, for log-probabilities for example. The engine
thread then waits for a C++ or a Triton compiler, on a busy machine for much longer than for any step before,
and must not be taken for hung.
"""

from __future__ import annotations

from torch._dynamo.callback import CallbackArgs, on_compile_end, on_compile_start


class Compilations:
    """Count this process's compilations from now on. Written by the compiling thread, read by any."""

    def __init__(self) -> None:
        self.finished = 0
        self.running = False
        on_compile_start(self._start)
        on_compile_end(self._end)

    def _start(self, _: CallbackArgs) -> None:
        self.running = True

    def _end(self, _: CallbackArgs) -> None:
        self.finished += 1
        self.running = False
