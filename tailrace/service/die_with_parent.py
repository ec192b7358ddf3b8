"""Run a command that the kernel kills when the process that started it is gone.

    python die_with_parent.py PARENT_PID COMMAND ARG...

A front end or an edge that is killed without warning must not leave its server behind, holding the port and
answering nobody. The setting survives exec, so the command itself needs to know nothing of it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel, check that the parent is not gone already, and become the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
