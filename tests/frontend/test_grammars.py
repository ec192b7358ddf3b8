"""Grammars of requests are compiled within bounds, in another process, before vLLM and a worker see them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from frontend_svc.api_server import grammar_child
from frontend_svc.api_server.grammar_child import check_apart
from frontend_svc.api_server.grammar_verdict import INVALID, TOO_LARGE, Verdict
from tailrace.tenancy.body import LimitRefusal
from tailrace.tiny import MODEL_PATH
from tests.frontend.conftest import eventually
from tests.harness.forked import api_server_python
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import StructuredOutputsParams

    from frontend_svc.api_server.grammars import Grammars

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

# 60 KB that overflow the stack of whoever converts them.
DEEP: Final = {"type": "string", "pattern": "(" * 30_000 + "a" + ")" * 30_000}
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}}


def optional(count: int) -> dict[str, Any]:
    """Return a schema of so many properties, of which any may be there: it takes more than their square."""
    names: dict[str, object] = {f"a{n}": {} for n in range(count)}
    return {"type": "object", "properties": names, "minProperties": 1, "maxProperties": count - 1}


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(model=str(MODEL_PATH)).create_engine_config()


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    """Start the processes that check grammars with vLLM imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", api_server_python() or sys.executable)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars(config: VllmConfig) -> AsyncIterator[Grammars]:
    from frontend_svc.api_server.grammars import Grammars

    made = Grammars(config)
    yield made
    made.close()


async def checked(grammars: Grammars, **constraint: Any) -> StructuredOutputsParams:
    """Return a constraint of one kind as it goes to the engine."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    asked = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    async with asyncio.timeout(WAIT_S):
        params = await grammars.checked(asked, None)
    # A caller's own stay as they are.
    assert asked.structured_outputs == StructuredOutputsParams(**constraint)
    assert params.structured_outputs is not None
    return params.structured_outputs


def checked_now(grammars: Grammars, **constraint: Any) -> None:
    """Check a grammar that is known; raise StopIteration if it may be used."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    asked = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    grammars.checked(asked, None).send(None)


@pytest.mark.parametrize(
    ("constraint", "backend"),
    [
        ({"json": SCHEMA}, "xgrammar"),
        ({"json": json.dumps(SCHEMA)}, "xgrammar"),
        ({"json_object": True}, "xgrammar"),
        ({"regex": "a+"}, "xgrammar"),
        ({"choice": ["a", "b"]}, "xgrammar"),
        ({"grammar": 'root ::= "a"'}, "xgrammar"),
        ({"grammar": 'start: "a"'}, "xgrammar"),
        # xgrammar does not take it.
        ({"json": {"type": "integer", "multipleOf": 2}}, "guidance"),
    ],
    ids=str,
)
async def test_valid_grammar_is_as_vllm_leaves_it(
    grammars: Grammars, config: VllmConfig, constraint: dict[str, Any], backend: str
) -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.tokenizers import cached_tokenizer_from_config

    by_vllm = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    tokenizer = cached_tokenizer_from_config(config.model_config)
    by_vllm.verify(config.model_config, None, config.structured_outputs_config, tokenizer)
    ours = await checked(grammars, **constraint)
    assert ours == by_vllm.structured_outputs
    assert ours._backend == backend


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"json": "{"}, "Invalid JSON"),
        ({"regex": "a("}, "unclosed group"),
        ({"choice": []}, "empty list"),
        ({"structural_tag": "{}"}, "Invalid structural_tag"),
    ],
)
async def test_invalid_grammar_is_refused_with_vllms_reason(
    grammars: Grammars, constraint: dict[str, Any], reason: str
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=reason):
        await checked(grammars, **constraint)


@pytest.mark.parametrize(
    ("schema", "exceeded"),
    [(DEEP, "4 MiB of stack"), (optional(1_000), "of memory|of CPU time")],
    ids=["deep", "wide"],
)
async def test_grammar_that_would_end_this_process_is_refused(
    grammars: Grammars, schema: dict[str, Any], exceeded: str
) -> None:
    with pytest.raises(LimitRefusal, match=exceeded) as refused:
        await checked(grammars, json=schema)
    assert refused.value.status == TOO_LARGE
    # It is known from now on: nothing is waited for. And the next one is not affected.
    with pytest.raises(LimitRefusal):
        checked_now(grammars, json=schema)
    assert (await checked(grammars, json=SCHEMA))._backend == "xgrammar"


def occupy_cpu() -> Verdict:
    while True:
        pass


def take_memory() -> Verdict:
    return Verdict(message="x" * (8 << 30))


def wait() -> Verdict:
    time.sleep(WAIT_S)
    return Verdict()


def crash() -> Verdict:
    os.kill(os.getpid(), signal.SIGSEGV)
    return Verdict()


def end() -> Verdict:
    os.kill(os.getpid(), signal.SIGKILL)
    return Verdict()


def start_no_thread() -> Verdict:
    raise BlockingIOError


def end_of_forgotten() -> int:
    """Return how a bounded process ends that nobody ends."""
    pid = os.fork()
    if pid == 0:
        try:
            grammar_child._bound_process()
            wait()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def raise_error() -> Verdict:
    raise ValueError("not a grammar")


@pytest.mark.parametrize(
    ("check", "status", "message"),
    [
        (occupy_cpu, TOO_LARGE, "1 s of CPU time"),
        (take_memory, TOO_LARGE, "1024 MiB of memory"),
        (crash, TOO_LARGE, "4 MiB of stack"),
        (raise_error, INVALID, "not a grammar"),
        (end, 503, "in time"),
        (start_no_thread, 503, "in time"),
        (Verdict, 0, ""),
    ],
)
async def test_each_bound_has_its_refusal(
    monkeypatch: pytest.MonkeyPatch, check: Any, status: int, message: str
) -> None:
    # The others must meet theirs first, on any machine.
    monkeypatch.setattr(grammar_child, "CPU_S", 1 if check is occupy_cpu else 100)
    monkeypatch.setattr(grammar_child, "CHECK_S", 100.0)
    verdict = check_apart(check)
    assert verdict.status == status and message in verdict.message


async def test_check_that_waits_for_something_else_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_child, "CHECK_S", 0.1)
    verdict = check_apart(wait)
    assert verdict.status == 503 and not verdict.is_final


async def test_check_that_nobody_waits_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_child, "CHECK_S", 0.1)
    assert end_of_forgotten() == -signal.SIGALRM


async def test_process_that_ends_is_replaced(grammars: Grammars) -> None:
    await checked(grammars, regex="first")
    assert grammars._process is not None
    first = grammars._process
    first.kill()
    await asyncio.to_thread(first._process.wait, WAIT_S)
    await checked(grammars, regex="second")
    assert grammars._process is not first


async def test_choices_that_are_too_many_to_remember_are_checked_again(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    from frontend_svc.api_server import grammars as module

    monkeypatch.setattr(module, "_CACHE_BYTES", 1_000)
    for _ in range(2):
        assert "c99" in str((await checked(grammars, choice=[f"c{n}" for n in range(100)])).grammar)
    assert not any("c99" in str(known.changes) for known in grammars._known.values())


async def test_end_does_not_wait_for_a_process_that_starts(config: VllmConfig) -> None:
    from frontend_svc.api_server.grammars import Grammars

    grammars = Grammars(config)
    asked = asyncio.create_task(checked(grammars, regex="a"))
    await eventually(lambda: grammars._process is not None)
    grammars.close()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert grammars._process is None or grammars._process._process.wait(WAIT_S) == -signal.SIGKILL
    await asyncio.to_thread(grammars._thread.shutdown)


async def test_event_loop_goes_on(grammars: Grammars) -> None:
    await checked(grammars, regex="known")
    assert grammars._process is not None
    pid = grammars._process._process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        asked = asyncio.create_task(checked(grammars, regex="new"))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not asked.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    await asked


class Checks:
    """Takes the place of the process, and waits."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.has_ended = False
        self.go_on = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def check(self, pickled: bytes) -> Verdict:
        import pickle

        asyncio.run_coroutine_threadsafe(self.go_on.wait(), self.loop).result(WAIT_S)
        self.asked.append(pickle.loads(pickled).regex)
        return Verdict()

    def kill(self) -> None:
        """End it; see GrammarProcess."""


def of_tenant(name: str, ended: list[str]) -> Any:
    return SimpleNamespace(tenant=SimpleNamespace(name=name), end_turn=lambda: ended.append(name))


async def test_tenants_take_turns_and_each_may_have_some_that_wait(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    from frontend_svc.api_server import grammars as module

    monkeypatch.setattr(module, "MAX_WAITING", 3)
    grammars, checks, ended = module.Grammars(config), Checks(), list[str]()
    grammars._process = checks  # type: ignore[assignment]

    def ask(tenant: str, regex: str) -> asyncio.Task[Any]:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex))
        return asyncio.create_task(grammars.checked(params, of_tenant(tenant, ended)))

    asked = [ask("a", f"a{n}") for n in range(3)]
    asked += [ask("a", "a2")]
    refused = ask("a", "a4")
    asked += [ask("b", "b0")]
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(LimitRefusal, match="Too many new grammars") as error:
            await refused
        assert error.value.status == 429
        # Its client has gone; another one waits for the same.
        asked.pop(2).cancel()
        checks.go_on.set()
        await asyncio.gather(*asked)
    # The same one was checked once, and others' turns were over before.
    assert checks.asked == ["a0", "b0", "a1", "a2"]
    assert ended.count("a") == 5
    await ask("b", "a1")
    assert ended.count("b") == 1
    grammars.close()
