"""Stand in for a process that is forked from one with the imports done (preloaded.py).

    python fork_python.py SOCKET PYTHON_ARG...

It has the standard streams and other file descriptors of this one, is sent its signals, and is killed when
this one is; this one ends as it does. With other arguments than -c and -m, it is just Python.
"""

import contextlib
import json
import os
import signal
import socket
import sys

# Not SIGINT: Ctrl-C in a terminal reaches both.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def main() -> None:
    """Entry point."""
    path, *arguments = sys.argv[1:]
    if arguments[0] not in ("-c", "-m", "-u"):
        os.execv(sys.executable, [sys.executable, *arguments])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inherited = [int(name) for name in os.listdir("/proc/self/fd")]
    # Not the folder's own, which is closed again, and not the connection.
    fds = [fd for fd in inherited if fd != connection.fileno() and _open(fd)]
    start = {
        "arguments": arguments,
        "env": dict(os.environ),
        "folder": os.getcwd(),
        "fds": fds,
        "session": False,
        "dies_with_client": True,
    }
    connection.connect(path)
    socket.send_fds(connection, [json.dumps(start).encode()], fds)
    # Whoever reads from them must see that they are closed once the process closes them.
    for fd in fds:
        os.close(fd)
    pid = int(connection.recv(64))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _FORWARDED:
        signal.signal(number, lambda number, frame: _forward(pid, number))
    code = int(connection.recv(64) or 1)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _forward(pid: int, number: int) -> None:
    # It may have ended already.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _open(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


if __name__ == "__main__":
    main()
