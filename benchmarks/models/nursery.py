"""A process that has imported vLLM, and forks one for each cell.

    python -m benchmarks.models.nursery [--v2]

It reads a line of JSON for each (cell.Way) and writes one with what came of it (cell.Result). Threads begin
in the children alone, so that nothing is held for ever in any of them.
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

from benchmarks.models.cell import Result, Way, measure
from benchmarks.models.triton_on_cpu import use_model_runner_v2

_DEADLINE_S: Final = 900.0
_LAST_LINES: Final = 3
# What Triton's bindings say at every exit.
_NOISE: Final = ("nanobind:", " - ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--v2", action="store_true", help="Model Runner V2, in Triton's interpreter")
    if parser.parse_args().v2:
        use_model_runner_v2()
    else:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Compiled helpers ask a Triton backend for more than its name.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import benchmarks.models.warm  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(asdict(_forked(Way(**json.loads(line))))), flush=True)


def _forked(way: Way) -> Result:
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            _in_the_child(way, answer, said)
        status = _ended(child)
        if status is None:
            return Result(error=f"it took longer than {_DEADLINE_S:.0f} s")
        answer.seek(0)
        if text := answer.read():
            return Result(**json.loads(text))
        said.seek(0)
        lines = [line for line in said.read().decode().splitlines() if not line.startswith(_NOISE)]
        last = " / ".join(lines[-_LAST_LINES:])
        return Result(error=f"it ended with {os.waitstatus_to_exitcode(status)}: {last}")


def _in_the_child(way: Way, answer: IO[bytes], said: IO[bytes]) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    status = 1
    try:
        answer.write(json.dumps(asdict(measure(way))).encode())
        answer.flush()
        status = 0
    except Exception:
        logging.exception("not measured")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The interpreter would take seconds more to take vLLM's modules apart.
        os._exit(status)


def _ended(child: int) -> int | None:
    """Its wait status; None: it was killed, since it took too long."""
    descriptor = os.pidfd_open(child)
    try:
        in_time = bool(select.select([descriptor], [], [], _DEADLINE_S)[0])
    finally:
        os.close(descriptor)
    # Its ranks notice, and end by themselves.
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return status if in_time else None


if __name__ == "__main__":
    main()
