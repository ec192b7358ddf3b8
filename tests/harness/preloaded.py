"""Python with its imports done: a process that forks others, which run a command line of `python`.

    python -m tests.harness.preloaded FD MODULE...

It imports the modules and answers at the listening socket FD. Each connection asks for one process with a
message (see `Start`) and the file descriptors that the process gets, is sent its id, and, once it has
ended, its exit code. The server ends at the end of its standard input.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import resource_tracker
from types import ModuleType
from typing import Final

import msgspec

MESSAGE_BYTES: Final = 1 << 20
"""The most that a message has, environment included."""
FDS: Final = 64
"""The most file descriptors that a process is given."""

# The server's own file descriptors are numbered from here, so that a process can get any number below.
_OWN_FDS: Final = 500
# How long a client may take for its request: it sends it at once.
_REQUEST_S: Final = 300.0


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One process to fork."""

    # As after `python`: [-u] -c CODE ARG... or [-u] -m MODULE ARG...
    arguments: Sequence[str]
    env: Mapping[str, str]
    folder: str
    # The number of each file descriptor that comes with the request.
    fds: Sequence[int]
    # In a session of its own: killing its process group includes its children.
    session: bool
    # Killed as soon as the client closes the connection.
    dies_with_client: bool
    # sys.executable; empty: the server's own.
    python: str = ""


class _Server:
    def __init__(
        self, listener: socket.socket, set_by_imports: Mapping[str, str], on_interrupt: signal._HANDLER
    ) -> None:
        self._set_by_imports = set_by_imports
        self._on_interrupt = on_interrupt
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        # A byte for each SIGCHLD.
        woken, wakes = socket.socketpair()
        self._woken, self._wakes = _moved(woken), _moved(wakes)
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._clients: dict[int, socket.socket] = {}
        self._dying: dict[socket.socket, int] = {}

    def run(self) -> Start | None:
        """Serve until the end of standard input. Return in a forked process, too, with what it is to run."""
        try:
            return self._serve()
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _serve(self) -> Start | None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == sys.stdin.fileno():
                    return None
                if key.fileobj is self._listener:
                    if start := self._accept():
                        return start
                elif key.fileobj is self._woken:
                    with suppress(BlockingIOError):
                        self._woken.recv(4096)
                    self._reap()
                else:
                    self._closed(key.fileobj)

    def _accept(self) -> Start | None:
        client = _moved(self._listener.accept()[0])
        client.settimeout(_REQUEST_S)
        fds: list[int] = []
        try:
            message, fds, _, _ = socket.recv_fds(client, MESSAGE_BYTES, FDS)
            start = msgspec.json.decode(message, type=Start)
        except (OSError, msgspec.DecodeError) as error:
            # A client that is gone already.
            print(f"preloaded: {error}", file=sys.stderr)
            client.close()
            start = None
        pid = 0 if start is None else os.fork()
        if start is not None and pid == 0:
            self._become(start, fds, client)
            return start
        for fd in fds:
            os.close(fd)
        if start is not None:
            self._clients[pid] = client
            if start.dies_with_client:
                self._dying[client] = pid
                self._selector.register(client, selectors.EVENT_READ)
        return None

    def _become(self, start: Start, fds: Sequence[int], client: socket.socket) -> None:
        signal.signal(signal.SIGINT, self._on_interrupt)
        self._selector.close()
        for mine in (self._listener, self._woken, self._wakes, *self._clients.values()):
            mine.close()
        if start.session:
            os.setsid()
        # First out of the way of each other's numbers.
        spare = [_above(fd) for fd in fds]
        for fd, number in zip(spare, start.fds, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        # The server has the tracker as its child, not this process.
        resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
        os.chdir(start.folder)
        os.environ.clear()
        os.environ.update({**self._set_by_imports, **start.env})
        client.send(str(os.getpid()).encode())
        client.close()

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if client := self._clients.pop(pid, None):
                    if self._dying.pop(client, None):
                        self._selector.unregister(client)
                    # Gone, or it never waits.
                    with suppress(OSError):
                        client.send(str(os.waitstatus_to_exitcode(status)).encode())
                    client.close()

    def _closed(self, client: object) -> None:
        assert isinstance(client, socket.socket)
        self._selector.unregister(client)
        # It is reaped afterwards, so the number is still its own.
        os.kill(self._dying.pop(client), signal.SIGKILL)


def _above(fd: int) -> int:
    """Move a file descriptor to a number of the server's own."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _OWN_FDS)
    os.close(fd)
    return moved


def _moved(end: socket.socket) -> socket.socket:
    return socket.socket(fileno=_above(end.detach()))


def _run(start: Start) -> int:
    """Run the command line as the interpreter does; return the exit code."""
    if start.python:
        sys.executable = start.python
    options = list(start.arguments)
    while options[0] == "-u":  # nothing is written by print
        options.pop(0)
    kind, what, *arguments = options
    sys.orig_argv = [sys.executable, *start.arguments]
    sys.argv = ["-c" if kind == "-c" else what, *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        if kind == "-c":
            exec(what, vars(main))
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Entry point."""
    listener, *modules = sys.argv[1:]
    # Ctrl-C in a terminal is for those who use this one: they end it.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before there are threads, if an import starts some.
    resource_tracker.ensure_running()
    tracker = resource_tracker._resource_tracker
    tracker._fd = _above(tracker._fd)  # type: ignore[attr-defined]
    before = dict(os.environ)
    gc.disable()
    for module in modules:
        import_module(module)
    gc.freeze()
    gc.enable()
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    listening = _moved(socket.socket(fileno=int(listener)))
    start = _Server(listening, set_by_imports, on_interrupt).run()
    if start is None:
        # Waits for its end, and so for that of all that use it.
        tracker._stop()  # type: ignore[attr-defined]
    code = 0 if start is None else _run(start)
    # What the interpreter does at its end, except that it frees what was imported.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
