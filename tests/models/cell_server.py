"""A process that has imported vLLM, and forks one process per cell.

        python -m tests.models.cell_server [--v2]

It reads one line of JSON per cell (cell.RunConfig) and writes one with the results (cell.Result). Only the
children start threads, so that no lock is held forever in any of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import signal
import sys
import tempfile
from dataclasses import asdict
from typing import IO, Final, NoReturn

from tests.models.cell import Result, RunConfig, measure
from tests.models.triton_on_cpu import use_model_runner_v2

_DEADLINE_S: Final = 900.0
_LAST_LINES: Final = 3
# Printed by Triton's bindings at every exit.
_IGNORED_PREFIXES: Final = ("nanobind:", " - ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--v2", action="store_true", help="Model Runner V2, in Triton's interpreter")
    if parser.parse_args().v2:
        use_model_runner_v2()
    else:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Compiled helpers need more of a Triton backend than its name.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import tests.models.warm  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(asdict(_run_forked(RunConfig(**json.loads(line))))), flush=True)


def _run_forked(config: RunConfig) -> Result:
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            _run_child(config, answer, output)
        status = _wait_or_kill(child)
        if status is None:
            return Result(error=f"timed out after {_DEADLINE_S:.0f} s")
        answer.seek(0)
        if text := answer.read():
            return Result(**json.loads(text))
        output.seek(0)
        lines = [
            line for line in output.read().decode().splitlines() if not line.startswith(_IGNORED_PREFIXES)
        ]
        last = " / ".join(lines[-_LAST_LINES:])
        return Result(error=f"exited with {os.waitstatus_to_exitcode(status)}: {last}")


def _run_child(config: RunConfig, answer: IO[bytes], output: IO[bytes]) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    status = 1
    try:
        answer.write(json.dumps(asdict(measure(config))).encode())
        answer.flush()
        status = 0
    except Exception:
        logging.exception("measurement failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The interpreter would take seconds more to unload vLLM's modules.
        os._exit(status)


def _wait_or_kill(child: int) -> int | None:
    """Return the child's wait status; None if it was killed after the deadline."""
    descriptor = os.pidfd_open(child)
    try:
        in_time = bool(select.select([descriptor], [], [], _DEADLINE_S)[0])
    finally:
        os.close(descriptor)
    # Its ranks notice this, and exit.
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return status if in_time else None


if __name__ == "__main__":
    main()
