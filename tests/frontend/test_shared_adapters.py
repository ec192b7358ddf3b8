"""An adapter that one front end loads is known to all; see tests/e2e/test_adapters.py for real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec
import pytest
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest

from frontend_svc import adapters
from frontend_svc.adapters import SharedAdapters
from frontend_svc.api_server.adapters import ShareAdapters
from tailrace.records import AdapterRecord
from tailrace.service.tasks import cancel
from tailrace.store.client import StoreUnavailable
from tailrace.store.membership import Membership
from tailrace.store.store import Store
from tailrace.telemetry.incidents import TAKEN_NAME, UNREADABLE
from tailrace.wire.requests import UtilityCall
from tests.waiting import WAIT_S

pytestmark = pytest.mark.vllm


class Engine:
    """Every load succeeds."""

    def __init__(self) -> None:
        config = SimpleNamespace(model="tiny", max_model_len=100)
        self.model_config, self.renderer, self.input_processor = config, None, None

    async def add_lora(self, request: object) -> bool:
        return True


class FrontEnd:
    """vLLM's list of models, with what tells it and what follows it; no HTTP."""

    def __init__(self, store: Store, members: Membership, path: Path) -> None:
        self.shared = SharedAdapters(store, members, "tiny")
        self.members = members
        self._path = self.shared.follow(path)
        self.models: Any = OpenAIServingModels(Engine(), [BaseModelPath("tiny", "tiny")])
        self._share: type[ShareAdapters] = type("Share", (ShareAdapters,), {})
        self._middleware = self._share(self._app)

    async def start(self, given: Mapping[str, str]) -> None:
        """`given`: paths of adapters by name."""
        for name, path in given.items():
            await self.models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=path))
        await self._share.share(self._path, self._call, ["tiny", *given])

    async def _app(self, *arguments: object) -> None:
        pass

    async def _no_message(self) -> MutableMapping[str, Any]:
        raise AssertionError

    async def _call(self, method: str, *arguments: object) -> object:
        answer: asyncio.Future[Sequence[bytes]] = asyncio.get_running_loop().create_future()
        args = msgspec.Raw(msgspec.msgpack.encode(arguments))
        self.shared.handle_call(UtilityCall(0, 7, method, args), answer.set_result)
        (_, _, _, _, (call_id, failure, result), *_) = msgspec.msgpack.decode((await answer)[0])
        assert call_id == 7
        if failure is not None:
            raise Exception(failure)
        return result[1]

    async def names(self) -> dict[str, str]:
        """Return what the next request finds: paths by name."""
        scope = {
            "type": "http",
            "app": SimpleNamespace(state=SimpleNamespace(openai_serving_models=self.models)),
        }
        await self._middleware(scope, self._no_message, self._app)
        return {name: adapter.lora_path for name, adapter in self.models.lora_requests.items()}

    async def load(self, name: str, path: str, in_place: bool = False) -> int:
        """Return the HTTP status."""
        return (await self.load_answer(name, path, in_place))[0]

    async def load_answer(self, name: str, path: str, in_place: bool = False) -> tuple[int, str]:
        """Return the HTTP status and the text."""
        await self.names()
        request = LoadLoRAAdapterRequest(lora_name=name, lora_path=path, load_inplace=in_place)
        return _answer(await self.models.load_lora_adapter(request))

    async def unload(self, name: str) -> int:
        """Return the HTTP status."""
        await self.names()
        return _answer(await self.models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name)))[0]

    async def finds(self, paths: dict[str, str]) -> None:
        """Wait until requests find these adapters."""

        async def found() -> bool:
            return await self.names() == paths

        await self._wait_until(found)

    async def follows(self, paths: dict[str, str]) -> None:
        """Wait until etcd's watch has shown these adapters; requests find what is loaded here before that."""

        async def shown() -> bool:
            return {each.name: each.path for each in self.members.adapters.values()} == paths

        await self._wait_until(shown)

    async def _wait_until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        changed = asyncio.Event()
        self.members.add_listener(changed.set)
        async with asyncio.timeout(WAIT_S):
            while not await holds():
                await changed.wait()
                changed.clear()


def _answer(response: ErrorResponse | str) -> tuple[int, str]:
    if isinstance(response, ErrorResponse):
        return response.error.code, response.error.message
    return 200, response


class Start(Protocol):
    """Start a front end with these adapters, paths by name."""

    async def __call__(self, **given: str) -> FrontEnd: ...


@pytest.fixture
async def start(store: Store, tmp_path: Path) -> AsyncIterator[Start]:
    """Start front ends."""
    running: list[FrontEnd] = []

    async def start_one(**given: str) -> FrontEnd:
        members = await Membership.start(store)
        running.append(FrontEnd(store, members, tmp_path / f"adapters{len(running)}"))
        await running[-1].start(given)
        return running[-1]

    yield start_one
    for front in running:
        await front.shared.close()
        await front.members.close()


async def test_all_front_ends_know_what_one_loaded(start: Start) -> None:
    first, second = await start(), await start()
    assert await first.load("org/a", "/a") == 200
    assert await first.names() == {"org/a": "/a"}
    await second.finds({"org/a": "/a"})
    later = await start()
    assert await later.names() == {"org/a": "/a"}

    assert await second.load("org/a", "/other") == 400
    assert await second.load("org/a", "/other", in_place=True) == 200
    await first.finds({"org/a": "/other"})

    assert await first.unload("org/a") == 200
    assert await first.names() == {}
    for front in (second, later):
        await front.finds({})
    assert await second.unload("org/a") == 404


def skipped() -> float:
    """Return how many records were skipped so far."""
    return float(UNREADABLE.labels(TAKEN_NAME)._value.get())


async def test_a_front_end_keeps_its_own_and_its_models(
    start: Start, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = await start(given="/given"), await start()
    before = skipped()
    other = AdapterRecord(model="other", name="b", path="/b")
    base = AdapterRecord(model="tiny", name="tiny", path="/base")
    for record in (other, base):
        await store.put(record.key, msgspec.json.encode(record))
    assert await second.load("given", "/run-time") == 200
    assert await second.load("a", "/a") == 200
    await first.finds({"given": "/given", "a": "/a"})
    assert await second.names() == {"given": "/run-time", "a": "/a"}
    # The base model's name at both.
    assert skipped() == before + 3
    assert len([line for line in caplog.messages if "given, from /run-time, is skipped" in line]) == 1

    for in_place in (False, True):
        status, text = await first.load_answer("given", "/other", in_place)
        assert status == 400 and "'given' has already been loaded" in text
        assert await first.load("tiny", "/other", in_place) == 400
    assert await first.unload("given") == 400
    assert await first.unload("a") == 200
    assert await first.names() == {"given": "/given"}
    await second.finds({"given": "/run-time"})

    restarted = await start(given="/given")
    assert await restarted.names() == {"given": "/given"}
    assert await second.unload("given") == 200
    assert await first.names() == {"given": "/given"}


async def test_what_cannot_be_recorded_is_not_loaded(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start()
    for name, path, field in (("a", "/" + "x" * 5_000, "lora_path"), ("a" * 600, "/a", "lora_name")):
        status, text = await first.load_answer(name, path)
        assert status == 400 and f"`{field}`" in text
    # Each character takes nine in a key.
    status, text = await first.load_answer("\u20ac" * 120, "/a")
    assert status == 400 and "lora_name" in text and "1024" in text
    assert await first.load("a", "/a") == 200
    monkeypatch.setattr(adapters, "_ADAPTERS_MAX", 1)
    status, text = await first.load_answer("b", "/b")
    assert status == 400 and "1 adapters are loaded already" in text
    assert await first.load("a", "/b", in_place=True) == 200
    monkeypatch.undo()

    async def fail(*arguments: object) -> None:
        raise StoreUnavailable("no etcd")

    for method in ("put", "compare_and_swap", "delete"):
        monkeypatch.setattr(store, method, fail)
    status, text = await first.load_answer("b", "/b")
    assert status == 503 and "no etcd" in text
    assert await first.load("a", "/new", in_place=True) == 503
    assert await first.unload("a") == 503
    assert await first.names() == {"a": "/b"}


async def test_what_is_stored_decides_after_a_failure(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes are made, and requests follow them, but the calls fail afterwards."""
    first, second = await start(), await start()

    def fail_afterwards(method: str, paths: dict[str, str]) -> None:
        change = getattr(store, method)

        async def changed(*arguments: object) -> None:
            monkeypatch.undo()
            await change(*arguments)
            await second.finds(paths)
            # What the front end knows by itself must not hide what it follows.
            await first.follows(paths)
            await first.finds(paths)
            raise StoreUnavailable("lost reply")

        monkeypatch.setattr(store, method, changed)

    fail_afterwards("compare_and_swap", {"a": "/a"})
    assert await first.load("a", "/a") == 503
    assert await first.names() == {"a": "/a"}
    fail_afterwards("put", {"a": "/b"})
    assert await first.load("a", "/b", in_place=True) == 503
    assert await first.names() == {"a": "/b"}
    fail_afterwards("delete", {})
    assert await first.unload("a") == 503
    assert await first.names() == {}


async def test_a_call_that_is_cancelled_leaves_nothing(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start()
    began = asyncio.Event()

    async def hang(*arguments: object) -> None:
        began.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(store, "compare_and_swap", hang)
    call = asyncio.create_task(first.load("a", "/a"))
    await began.wait()
    await cancel(call)
    assert await first.names() == {}


@pytest.mark.parametrize("in_place", [False, True])
async def test_two_front_ends_load_the_same_name_at_once(start: Start, in_place: bool) -> None:
    fronts = [await start(), await start()]
    loads = [front.load("a", f"/{number}", in_place) for number, front in enumerate(fronts)]
    statuses = await asyncio.gather(*loads)
    assert sorted(statuses) == ([200, 200] if in_place else [200, 400])
    (stored,) = (await start()).members.adapters.values()
    if not in_place:
        assert stored.path == f"/{statuses.index(200)}"
    for front in fronts:
        await front.finds({"a": stored.path})


async def test_an_adapter_loaded_again_while_it_is_unloaded(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end that unloads it may see nothing but the same record as before."""
    first = await start()
    assert await first.load("a", "/a") == 200
    (record,) = first.members.adapters.values()
    delete = store.delete

    async def delete_and_load(key: str) -> int:
        await delete(key)
        return await store.put(key, msgspec.json.encode(record))

    monkeypatch.setattr(store, "delete", delete_and_load)
    assert await first.unload("a") == 200
    assert await first.names() == {"a": "/a"}


async def test_records_of_a_later_version(start: Start, store: Store) -> None:
    first = await start()
    known = AdapterRecord(model="tiny", name="known", path="/known").key
    await store.put(known, b'{"model":"tiny","name":"known","path":"/known","is_3d":false,"rank":8}')
    unknown = AdapterRecord(model="tiny", name="unknown", path="/unknown").key
    await store.put(unknown, later := b'{"model":"tiny","name":"unknown","path":["/a","/b"]}')
    await first.finds({"known": "/known"})
    assert await first.unload("unknown") == 404
    status, text = await first.load_answer("unknown", "/mine")
    assert status == 400 and "'unknown' has already been loaded by another front end" in text
    assert await store.get(unknown) == later
    assert await first.load("unknown", "/mine", in_place=True) == 200
    assert await first.names() == {"known": "/known", "unknown": "/mine"}
