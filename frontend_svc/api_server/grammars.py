"""Have grammars of requests (schemas, patterns, choices, tools) checked in another process, before vLLM and a
worker compile them.

A grammar of some kilobytes may overflow the stack of whoever compiles it, take gigabytes, or take hours. vLLM
would convert it on the event loop, and every worker compiles it on a thread that nothing stops. So a process
that may be killed does both first, within bounds (grammar_child.py). It starts with the first grammar.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import pickle
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from http import HTTPStatus
from multiprocessing.connection import Pipe
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from cachetools import LRUCache
from vllm.config import VllmConfig
from vllm.entrypoints.generate.base import protocol
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from frontend_svc.api_server.grammar_verdict import CHECK_S, INVALID, LATE, Verdict
from frontend_svc.api_server.request_limits import Account
from tailrace.tenancy.body import LimitRefusal

_log = logging.getLogger(__name__)

# Backends that compile in C++ without bounds: vLLM's default, which falls back to others, and what it tries.
_BACKENDS: Final = ("auto", "xgrammar")
MAX_WAITING: Final = 1_024
"""New grammars of one tenant that may wait. Its turn comes after one of each other tenant."""
# Longest wait for a turn.
_WAIT_S: Final = 60.0
# It imports vLLM: 5 s, or minutes on a machine that is busy, where one that is ended would only start again.
_START_S: Final = 600.0
# For a process that is ready to say so, beyond the bound of its check.
_ANSWER_S: Final = 5.0
_CACHE_BYTES: Final = 8 << 20


class GrammarProcess:
    """A process that checks grammars, as seen from a thread that waits for it."""

    def __init__(self) -> None:
        """Start it. Raise OSError."""
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "frontend_svc.api_server.grammar_child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A fork is to have no more threads than it starts itself, and the heaps that glibc would
                # reserve for each would count as its memory.
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                    "MALLOC_ARENA_MAX": "2",
                    # vLLM's bound is one of wall time, which a busy machine exceeds with a good pattern.
                    "VLLM_REGEX_COMPILATION_TIMEOUT_S": "0",
                },
            )

    def begin(self, config: VllmConfig) -> None:
        """Wait until it has read vLLM's configuration. Raise EOFError, OSError or TimeoutError."""
        self._connection.send_bytes(ForkingPickler.dumps(config))
        self._receive(_START_S)

    def check(self, pickled: bytes) -> Verdict:
        """Return what it says. Raise EOFError, OSError or TimeoutError if it says nothing."""
        self._connection.send_bytes(pickled)
        verdict: Verdict = self._receive(CHECK_S + _ANSWER_S)
        return verdict

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv()

    @property
    def has_ended(self) -> bool:
        """Return whether it has ended, by itself or by somebody else."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End it, from any thread; whoever waits for it gets an EOFError."""
        self._process.kill()

    def close(self) -> None:
        """End it and wait for that."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


class Grammars:
    """The checks of one API server, and what they said."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._process: GrammarProcess | None = None
        self._closed = False
        # Starts the process and waits for it, one grammar at a time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._known: LRUCache[bytes, Verdict] = LRUCache(_CACHE_BYTES, getsizeof=_size)
        self._tasks: dict[bytes, asyncio.Task[Verdict]] = {}
        # By tenant: who is next to wait for the thread, and how many wait.
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()

    async def checked(self, params: SamplingParams, account: Account | None) -> SamplingParams:
        """Return the parameters as vLLM's validation would leave them, whose grammar compiles within bounds.

        Raise LimitRefusal, or what vLLM raises at an invalid grammar.
        """
        pickled = pickle.dumps(params.structured_outputs)
        digest = hashlib.sha256(pickled).digest()
        verdict = self._known.get(digest)
        if verdict is None:
            if account is not None:
                # Other requests need not wait for this grammar.
                account.end_turn()
            tenant = "" if account is None or account.tenant is None else account.tenant.name
            if digest not in self._tasks:
                if self._waiting[tenant] >= MAX_WAITING:
                    message = "Too many new grammars of this client's structured outputs wait to be checked."
                    raise LimitRefusal(HTTPStatus.TOO_MANY_REQUESTS, message, 1)
                self._waiting[tenant] += 1
                task = asyncio.create_task(self._ask(digest, pickled, tenant), name="check a grammar")
                self._tasks[digest] = task
            # Others may wait for the same one.
            verdict = await asyncio.shield(self._tasks[digest])
        if verdict.status == INVALID:
            raise VLLMValidationError(verdict.message)
        if verdict.status:
            raise LimitRefusal(HTTPStatus(verdict.status), verdict.message)
        # A caller may use its own for another prompt.
        params, outputs = copy(params), copy(params.structured_outputs)
        for name, value in verdict.changes.items():
            setattr(outputs, name, value)
        params.structured_outputs = outputs
        return params

    async def _ask(self, digest: bytes, pickled: bytes, tenant: str) -> Verdict:
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        try:
            async with asyncio.timeout(_WAIT_S):
                await turn.acquire()
            try:
                loop = asyncio.get_running_loop()
                verdict = await loop.run_in_executor(self._thread, self._check, pickled)
            finally:
                turn.release()
            if verdict.is_final and _size(verdict) <= _CACHE_BYTES:
                self._known[digest] = verdict
            return verdict
        except TimeoutError:
            return LATE
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant], self._turns[tenant]
            del self._tasks[digest]

    def _check(self, pickled: bytes) -> Verdict:
        if self._process is not None and self._process.has_ended:
            # Since the last grammar: that does not cost this one its verdict.
            self._process.close()
            self._process = None
        try:
            if self._process is None:
                self._process = GrammarProcess()
                if self._closed:
                    raise EOFError
                self._process.begin(self._config)
            return self._process.check(pickled)
        except (EOFError, OSError, TimeoutError) as error:
            if not self._closed:
                _log.warning("the process that checks grammars is replaced: %r", error)
            if self._process is not None:
                self._process.close()
                self._process = None
            return LATE

    def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
        for task in self._tasks.values():
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _size(verdict: Verdict) -> int:
    return 512 + len(verdict.message) + sum(len(str(value)) for value in verdict.changes.values())


def check_elsewhere(config: VllmConfig, processor: InputProcessor) -> Grammars | None:
    """Have vLLM compile no grammars in this process, and return what does; None for backends that are left
    alone."""
    # vLLM compiles tags while it parses a request, by xgrammar, whichever backend is configured.
    protocol.validate_structural_tag_payload = _check_tag
    if config.structured_outputs_config.backend not in _BACKENDS:
        return None
    # Without it, vLLM's validation of requests leaves structured outputs out.
    processor.structured_outputs_config = None
    return Grammars(config)


def _check_tag(payload: object, *, parameter: str) -> None:
    """Take the place of vLLM's function, which compiles the tag as well: that comes later."""
    if not isinstance(payload, str) or not payload:
        raise VLLMValidationError(f"Invalid {parameter} structural_tag specification.", parameter=parameter)
