"""ASGI middleware for vLLM's Python app: adapters that are loaded at run time, here or behind another front
end of the model.

vLLM keeps them in a dictionary of its API layer, OpenAIServingModels.lora_requests. Before each request it is
made to agree with the file that `frontend_svc` writes; workers load an adapter with the first request that
names it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
from vllm.entrypoints.openai.models.serving import OpenAIServingModels, create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.lora.request import LoRARequest

from frontend_svc.api_server.middleware import App, HttpMiddleware, Message, Receive, Send
from frontend_svc.api_server.spec import ADAPTER_LOADED, ADAPTER_UNLOADED, ADAPTERS_GIVEN
from tailrace.files import Stamp, file_stamp
from tailrace.records import AdapterRecord
from tailrace.telemetry.incidents import LimitedLog

log = logging.getLogger(__name__)

# More than `frontend_svc` takes.
_CALL_S: Final = 30.0

_records = msgspec.json.Decoder(list[AdapterRecord])
_limited: Final = LimitedLog(log)


class ShareAdapters(HttpMiddleware):
    """Follow the file, and report adapters that are loaded or unloaded here.

    What is in the file was loaded at run time, here or elsewhere, and is recorded. It never replaces what was
    given at the start.
    """

    # None: nothing is shared.
    path: ClassVar[Path | None] = None
    # vLLM's utility call to an engine core, which here is `frontend_svc`.
    call: ClassVar[Callable[..., Awaitable[object]]]
    # Names of adapters (--lora-modules), and of the base model.
    given: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._models: Any = None
        # Which version of the file was read, None: it is to be read again; and the names in it.
        self._read: Stamp | None = None
        self._names: frozenset[str] = frozenset()

    @classmethod
    async def share(cls, path: Path, call: Callable[..., Awaitable[object]], given: Iterable[str]) -> None:
        """Share adapters from now on."""
        cls.path, cls.call, cls.given = path, call, frozenset(given)
        try:
            async with asyncio.timeout(_CALL_S):
                await call(ADAPTERS_GIVEN, sorted(cls.given))
        # vLLM raises a bare Exception with the failure message of a utility call. `frontend_svc` only counts
        # and logs what is skipped here.
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("the names of given adapters could not be told: %s", error or type(error).__name__)

    async def handle(self, scope: Message, receive: Receive, send: Send) -> None:
        if self.path is not None:
            if self._models is None:
                self._models = scope["app"].state.openai_serving_models
                self._report_changes(self._models)
            self._follow(self.path)
        await self._app(scope, receive, send)

    def _follow(self, path: Path) -> None:
        version = file_stamp(path)
        if version == self._read:
            return
        try:
            records = {record.name: record for record in _records.decode(path.read_bytes())}
        except (OSError, msgspec.DecodeError) as error:
            _limited.write(logging.WARNING, "unread", f"cannot read which adapters are loaded: {error}")
            return
        for name in self.given & records.keys():
            del records[name]
        known = self._models.lora_requests
        for name in self._names - records.keys():
            known.pop(name, None)
        for name, record in records.items():
            loaded = known.get(name)
            if loaded is None or (loaded.lora_path, loaded.is_3d_lora_weight) != (record.path, record.is_3d):
                known[name] = LoRARequest(
                    lora_name=name,
                    lora_int_id=self._models.lora_id_counter.inc(1),
                    lora_path=record.path,
                    is_3d_lora_weight=record.is_3d,
                )
        self._names = frozenset(records)
        self._read = version

    def _report_changes(self, models: OpenAIServingModels) -> None:
        """Wrap the two methods of vLLM's that its routes call."""
        load, unload = models.load_lora_adapter, models.unload_lora_adapter

        async def load_and_report(
            request: LoadLoRAAdapterRequest, base_model_name: str | None = None
        ) -> ErrorResponse | str:
            name, path, is_3d = request.lora_name, request.lora_path, bool(request.is_3d_lora_weight)
            if name and path:
                try:
                    fields = {"model": "-", "name": name, "path": path, "is_3d": is_3d}
                    msgspec.convert(fields, AdapterRecord)
                except msgspec.ValidationError as error:
                    # The request's fields.
                    return _refusal(f"The adapter cannot be loaded: {error}".replace("$.", "lora_"))
            if (refusal := self._refuse_given(name)) is not None:
                return refusal
            before = models.lora_requests.get(name)
            response = await load(request, base_model_name)
            if isinstance(response, ErrorResponse):
                return response
            in_place = request.load_inplace
            return await self._report(before, response, ADAPTER_LOADED, name, path, is_3d, in_place)

        async def unload_and_report(request: UnloadLoRAAdapterRequest) -> ErrorResponse | str:
            if (refusal := self._refuse_given(request.lora_name)) is not None:
                return refusal
            before = models.lora_requests.get(request.lora_name)
            response = await unload(request)
            if isinstance(response, ErrorResponse):
                return response
            return await self._report(before, response, ADAPTER_UNLOADED, request.lora_name)

        models.load_lora_adapter = load_and_report
        models.unload_lora_adapter = unload_and_report

    def _refuse_given(self, name: str) -> ErrorResponse | None:
        # vLLM answers for the base model's names.
        if name not in self.given or self._models.is_base_model(name):
            return None
        return _refusal(
            f"The lora adapter '{name}' has already been loaded: it was given when this front end started "
            "(--lora-modules), and stays until it stops."
        )

    async def _report(
        self, before: LoRARequest | None, response: str, method: str, name: str, *arguments: object
    ) -> ErrorResponse | str:
        """Return the response once the change is recorded; otherwise undo it here, and return an error."""
        is_recorded = False
        try:
            async with asyncio.timeout(_CALL_S):
                refusal = await type(self).call(method, name, *arguments)
            is_recorded = not refusal
        # vLLM raises a bare Exception with the failure message of a utility call.
        except Exception as error:  # noqa: BLE001 - see above
            return create_error_response(
                message=f"The change of adapter {name!r} could not be recorded for the other front ends: "
                f"{str(error) or type(error).__name__}; try again later.",
                err_type="ServiceUnavailableError",
                status_code=HTTPStatus.SERVICE_UNAVAILABLE,
            )
        finally:
            if not is_recorded:
                self._restore(name, before)
            # However it went, others may have changed it since: what is recorded decides.
            self._names |= {name}
            self._read = None
        return _refusal(str(refusal)) if refusal else response

    def _restore(self, name: str, before: LoRARequest | None) -> None:
        if before is None:
            self._models.lora_requests.pop(name, None)
        else:
            self._models.lora_requests[name] = before


def _refusal(message: str) -> ErrorResponse:
    """Return the error by which vLLM refuses an adapter that is loaded already."""
    return create_error_response(
        message=message, err_type="InvalidUserInput", status_code=HTTPStatus.BAD_REQUEST
    )
