"""Check and compile grammars of requests in a process that a grammar may crash, fill or occupy.

python -m frontend_svc.api_server.grammar_child FD

FD: a socket to the API server (grammars.py), on which vLLM's configuration comes first, and then one
StructuredOutputsParams after the other; a Verdict answers each. Every grammar gets a fork of this process,
which has the libraries and the tokenizer, bounds of its own, and nothing that a request before it has left.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe

from frontend_svc.api_server.grammar_verdict import (
    CHECK_S,
    CPU_S,
    INVALID,
    LATE,
    MEMORY_BYTES,
    STACK_BYTES,
    Verdict,
    too_large,
)
from frontend_svc.api_server.python_child import require_no_device
from tailrace.collector import collector_paused
from tailrace.telemetry.log_format import start_logging


def main() -> None:
    """Serve until the API server closes the socket."""
    # A terminal sends it to everything in the foreground; this process ends with its API server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_logging("WARNING")
    connection = Connection(int(sys.argv[1]))
    with collector_paused():
        require_no_device()
        from frontend_svc.api_server.grammar_compiler import GrammarCompiler
    try:
        compiler = GrammarCompiler(connection.recv())
        connection.send(None)
        while True:
            params = connection.recv()
            connection.send(check_apart(partial(compiler.check, params), connection))
    except (EOFError, ConnectionError):
        return


def check_apart(check: Callable[[], Verdict], connection: Connection | None = None) -> Verdict:
    """Return what `check` returns in a fork of this process, or why it did not return.

    `connection`: what the fork is not to hold open.
    """
    reader, writer = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            if connection is not None:
                connection.close()
            _bound_process()
            writer.send(_on_bounded_stack(check))
        finally:
            os._exit(0)
    writer.close()
    verdict: Verdict | None = None
    with reader:
        is_late = not reader.poll(CHECK_S)
        if is_late:
            os.kill(pid, signal.SIGKILL)
        else:
            with suppress(EOFError):
                verdict = reader.recv()
    _, status = os.waitpid(pid, 0)
    if verdict is not None:
        return verdict
    exceeded = "" if is_late else _exceeded(os.waitstatus_to_exitcode(status))
    return too_large(exceeded) if exceeded else LATE


def _exceeded(exit_code: int) -> str:
    """Return which bound a process exceeded that ended with this code; empty if something else ended it, such
    as a machine without memory."""
    if exit_code == -signal.SIGPROF:
        return f"{CPU_S} s of CPU time"
    if exit_code in (-signal.SIGSEGV, -signal.SIGBUS):
        return f"{STACK_BYTES >> 20} MiB of stack"
    # An allocation that fails in a thread of the compiler.
    return f"{MEMORY_BYTES >> 20} MiB of memory" if exit_code == -signal.SIGABRT else ""


def _bound_process() -> None:
    with open("/proc/self/statm") as statm:
        used_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Counts the time of all threads, like RLIMIT_CPU, but from now on.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    # In case nobody is left who would end it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, CHECK_S)


def _on_bounded_stack(check: Callable[[], Verdict]) -> Verdict:
    """Return what `check` returns in a thread; what overflows its stack ends the process."""
    verdicts: list[Verdict] = []

    def run() -> None:
        try:
            verdicts.append(check())
        except MemoryError:
            verdicts.append(too_large(f"{MEMORY_BYTES >> 20} MiB of memory"))
        # The machine is at fault.
        except OSError:
            verdicts.append(LATE)
        # Whatever else vLLM and the backends raise, the grammar is at fault.
        except Exception as error:  # noqa: BLE001
            verdicts.append(Verdict(INVALID, str(error)))

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return verdicts[0]


if __name__ == "__main__":
    main()
