"""`tailrace serve ranks`: the ranks of an engine on a machine that is not its worker's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import click

from tailrace import __version__ as tailrace_version
from tailrace.address import MalformedAddress, parse_address
from tailrace.collector import collector_paused
from tailrace.numeric import Duration, WholeRange
from tailrace.security.options import insecure_option
from tailrace.service.runtime import Shutdown, ending_process, run_service
from tailrace.telemetry.log_format import log_as
from worker_agent.engine.errors import EngineSettingError
from worker_agent.network import untrusted_reason, use_network_of
from worker_agent.parallel.node_gathering import Join, Loaded, NodeStream, Refused, Start, Stopped
from worker_agent.parallel.rank_leftovers import private_sockets

_RETRY_S: Final = 0.5
_ATTEMPT_S: Final = 10.0


class NodeRefused(RuntimeError):
    """The worker does not take this node, or did not come; the message says why."""


async def join(worker: str, node: int, vllm_version: str, seconds: float) -> tuple[NodeStream, Start]:
    """Join the worker at HOST:PORT and wait until every node has.

    Before the worker listens, and while its last engine still runs, the port is closed or vLLM's: both are
    retried. Raises NodeRefused, after `seconds` at the latest.
    """
    try:
        async with asyncio.timeout(seconds):
            while True:
                stream = await _connect(worker)
                if stream is not None:
                    start = await _wait_for_start(stream, Join(node, tailrace_version, vllm_version))
                    if start is not None:
                        return stream, start
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise NodeRefused(
            f"no engine started at {worker} within {seconds:g} s: --worker is the worker's master_addr and "
            "master_port"
        ) from None


async def follow(stream: NodeStream, loaded: Callable[[str], None]) -> bool:
    """Follow the worker until it has stopped its engine in order (True) or is gone (False).

    `loaded` is called with Loaded.meeting once the engine runs.
    """
    try:
        while True:
            message = await stream.read()
            if isinstance(message, Loaded):
                loaded(message.meeting)
            elif isinstance(message, Stopped):
                return True
    except (asyncio.IncompleteReadError, OSError, ValueError):
        return False


async def _wait_for_start(stream: NodeStream, message: Join) -> Start | None:
    """Join the worker at the other end, or return None if there is none. Raises NodeRefused."""
    start: Start | None = None
    try:
        stream.send(message)
        answer = await stream.read()
        if isinstance(answer, Refused):
            raise NodeRefused(f"the worker at {stream.peer} refused: {answer.reason}")
        if isinstance(answer, Start):
            start = answer
    except (asyncio.IncompleteReadError, OSError, ValueError):
        return None
    finally:
        if start is None:
            stream.close()
    return start


async def _connect(worker: str) -> NodeStream | None:
    """Connect, or return None if nobody listens."""
    host, port = parse_address(worker)
    try:
        async with asyncio.timeout(_ATTEMPT_S):
            return NodeStream(*await asyncio.open_connection(host, port))
    except (OSError, TimeoutError):
        return None


log = logging.getLogger(__name__)

_END_S: Final = 2.0


class NodeEnded(RuntimeError):
    """The engine of this node has ended; the message says why."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Settings from the command line."""

    worker: str
    node: int
    model: str | None
    join_timeout_s: float


def _address(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Validate HOST:PORT."""
    try:
        parse_address(value)
    except MalformedAddress as error:
        raise click.BadParameter(f"{value!r}: {str(error) or 'HOST:PORT expected'}") from error
    return value


@click.command("ranks")
@click.option(
    "--worker",
    required=True,
    metavar="HOST:PORT",
    callback=_address,
    help="The worker's master_addr and master_port.",
)
@click.option("--node", type=WholeRange(1), required=True, help="Number of this machine; the worker's is 0.")
@click.option("--model", help="The model's folder here.  [default: the worker's --model]")
@click.option(
    "--join-timeout",
    type=Duration(min=1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the worker and the other nodes.",
)
@insecure_option
def command(worker: str, node: int, model: str | None, join_timeout: float, insecure: bool) -> None:
    """Run an engine's ranks on another machine than its worker."""
    if not insecure and (reason := untrusted_reason(worker)):
        raise click.UsageError(reason)
    options = NodeOptions(worker, node, model, join_timeout)
    log_as("ranks", f"{worker}/{node}")
    run_service(lambda shutdown: _serve_or_log_error(options, shutdown))


async def _serve_or_log_error(options: NodeOptions, shutdown: Shutdown) -> None:
    """Serve until the engine ends or the process is told to stop; log what an operator can fix as one line.

    Never returns.
    """
    with ending_process(NodeRefused, NodeEnded, EngineSettingError), private_sockets():
        await serve(options)


async def serve(options: NodeOptions) -> None:
    """Run the ranks until the worker stops its engine.

    Raises NodeRefused, EngineSettingError, and NodeEnded if the worker or a rank is gone.
    """
    with collector_paused():
        from vllm.version import __version__ as vllm_version

        from worker_agent.engine.vllm.ranks import NodeRanks, folder_key, node_options
    stream, start = await join(options.worker, options.node, vllm_version, options.join_timeout_s)
    log.info("node %d of the engine at %s", options.node, options.worker)
    engine = node_options(start.settings, options.node, options.model)
    model = await asyncio.to_thread(folder_key, engine.model)
    if start.model and model and start.model != model:
        raise NodeEnded(f"--model {engine.model}: its files differ from those of the worker's model")
    use_network_of(stream.own)
    ranks = NodeRanks(engine)

    def loaded(meeting: str) -> None:
        ranks.meeting = meeting
        log.info("the engine is loaded")

    following = asyncio.create_task(follow(stream, loaded), name="worker")
    running = asyncio.create_task(_run(ranks.run), name="ranks")
    try:
        await asyncio.wait({following, running}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            raise NodeEnded(await running)
        if not following.result():
            raise NodeEnded(f"the worker at {options.worker} is gone")
        log.info("the worker has stopped its engine")
    finally:
        # The worker notices by this that its engine is lost, before anything else takes time.
        stream.close()
        following.cancel()
        await asyncio.to_thread(ranks.clear)
        # Their threads are of no use any more, and end with the process if not before.
        await asyncio.wait({following, running}, timeout=_END_S)


async def _run(ranks: Callable[[], str]) -> str:
    """Run the ranks in a thread. Raises EngineSettingError, and NodeEnded for everything else."""
    try:
        return await asyncio.to_thread(ranks)
    except EngineSettingError:
        raise
    except Exception as error:
        log.debug("the ranks did not start", exc_info=error)
        raise NodeEnded(f"the ranks did not start: {error}") from error
