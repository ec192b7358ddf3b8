"""LoRA adapters that users load at run time, known to every front end of their model.

Each is a record in etcd. The front end whose API server loaded it writes the record; all of them follow the
records, and keep a file with those of their model for the API server, which reads it when it has changed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from frontend_svc.api_server.spec import ADAPTER_LOADED, ADAPTERS_GIVEN
from tailrace.records import AdapterRecord
from tailrace.service.tasks import cancel, task_error
from tailrace.store.client import StoreUnavailable
from tailrace.store.membership import Membership
from tailrace.store.store import LONGEST_KEY, Store
from tailrace.telemetry.incidents import (
    TAKEN_NAME,
    UNREADABLE,
    UNREADABLE_NOW,
    loop_failed,
    loop_named,
    shown,
)
from tailrace.wire.requests import UtilityCall, utility_failure, utility_result

log = logging.getLogger(__name__)

_LOOP: Final = loop_named("calls of the API server")
_ADAPTERS_MAX: Final = 1_000
_CALLS_MAX: Final = 64
# For etcd to carry out a change and its watch to show it.
_CALL_S: Final = 20.0


class SharedAdapters:
    """The adapters of one model."""

    def __init__(self, store: Store, members: Membership, model: str) -> None:
        """`model`: public name."""
        self._store = store
        self._members = members
        self._model = model
        self._path: Path | None = None
        self._written: list[AdapterRecord] | None = None
        # Names that this front end serves since its start.
        self._given: frozenset[str] = frozenset()
        self._skipped: frozenset[str] = frozenset()
        # Set, and replaced, at every change of the membership.
        self._changed = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        members.add_listener(self._on_membership)

    async def close(self) -> None:
        """Cancel pending calls."""
        await cancel(*self._calls)

    def follow(self, path: Path) -> Path:
        """Write the adapters to a file from now on; return its path. Raise OSError."""
        self._path = path
        self._write()
        return path

    def handle_call(self, call: UtilityCall, reply: Callable[[Sequence[bytes]], None]) -> None:
        """Handle one of ADAPTER_CALLS; reply once this front end follows the change."""
        if len(self._calls) >= _CALLS_MAX:
            reply(utility_failure(call.call_id, f"{_CALLS_MAX} changes of adapters are pending already"))
            return
        task = asyncio.create_task(self._answer(call, reply), name=call.method)
        self._calls.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._calls.discard(task)
            if (error := task_error(task)) is not None:
                loop_failed(_LOOP, call.method, error)
                reply(utility_failure(call.call_id, "internal error"))

        task.add_done_callback(done)

    async def _answer(self, call: UtilityCall, reply: Callable[[Sequence[bytes]], None]) -> None:
        try:
            async with asyncio.timeout(_CALL_S):
                refusal = await self._carry_out(call)
        except TimeoutError:
            reason = f"etcd did not show the change within {_CALL_S:g} s, and may still do so"
            reply(utility_failure(call.call_id, reason))
        except (StoreUnavailable, msgspec.DecodeError, OSError) as error:
            reply(utility_failure(call.call_id, str(error)))
        else:
            reply(utility_result(call.call_id, refusal))

    async def _carry_out(self, call: UtilityCall) -> str:
        """Return why the call is refused; empty if it is carried out."""
        if call.method == ADAPTERS_GIVEN:
            (names,) = msgspec.msgpack.decode(call.args, type=tuple[list[str]])
            self._given = frozenset(names)
        elif call.method == ADAPTER_LOADED:
            arguments = msgspec.msgpack.decode(call.args, type=tuple[str, str, bool, bool])
            name, path, is_3d, in_place = arguments
            record = AdapterRecord(model=self._model, name=name, path=path, is_3d=is_3d)
            if refusal := await self._add(record, in_place):
                return refusal
        else:
            (name,) = msgspec.msgpack.decode(call.args, type=tuple[str])
            key = AdapterRecord(model=self._model, name=name, path="-").key
            await self._followed(await self._store.delete(key))
        # In case it could not be written when the change was seen.
        self._write()
        return ""

    async def _add(self, record: AdapterRecord, in_place: bool) -> str:
        """Return why the record is refused; empty if it is stored."""
        known = self._members.adapters
        if record.key not in known and len(known) >= _ADAPTERS_MAX:
            return f"{_ADAPTERS_MAX} adapters are loaded already, which is the most; unload some."
        if (size := len(record.key)) > LONGEST_KEY:
            return (
                f"lora_name: with the model's name, it takes {size} characters as a key in etcd (where some "
                f"characters take several); at most {LONGEST_KEY} are possible."
            )
        value = msgspec.json.encode(record)
        if in_place:
            revision = await self._store.put(record.key, value)
        else:
            # The API server did not know of one; it may have been loaded at the same moment elsewhere, or a
            # later version may have written what this one cannot read.
            revision = await self._store.compare_and_swap(record.key, None, value)
        if not revision:
            return (
                f"The lora adapter '{record.name}' has already been loaded by another front end. If you want "
                "to load the adapter in place, set 'load_inplace' to True."
            )
        await self._followed(revision)
        return ""

    async def _followed(self, revision: int) -> None:
        """Wait until what is known here includes this revision. The record may have changed again since."""
        while self._members.revision < revision:
            await self._changed.wait()

    def _on_membership(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._write()

    def _write(self) -> None:
        records = [record for record in self._members.adapters.values() if record.model == self._model]
        self._skip({record.name: record for record in records if record.name in self._given})
        records = [record for record in records if record.name not in self._given]
        if self._path is None or records == self._written:
            return
        # A reader sees the whole of one version.
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(records))
        os.replace(new, self._path)
        self._written = records

    def _skip(self, records: Mapping[str, AdapterRecord]) -> None:
        """Count and log the records that are skipped now, and were not before."""
        for name in records.keys() - self._skipped:
            UNREADABLE.labels(TAKEN_NAME).inc()
            log.warning(
                "the adapter that was loaded at run time as %s, from %s, is skipped: this front end serves "
                "that name since its start (--lora-modules, --served-model-name)",
                shown(name),
                shown(records[name].path),
            )
        UNREADABLE_NOW.labels(TAKEN_NAME).set(len(records))
        self._skipped = frozenset(records)
