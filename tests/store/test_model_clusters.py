"""Following the clusters that belong to one's own, with a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from tailrace.records import AdapterRecord
from tailrace.store.model_clusters import ADAPTERS, FRONT_ENDS, ModelClusters
from tailrace.store.store import Store
from tests.edge.test_directory import front_end
from tests.waiting import WAIT_S


async def test_clusters_below_ones_own_are_followed(etcd: str, cluster: str, store: Store) -> None:
    below = [await Store.connect([etcd], f"{cluster}.{name}") for name in ("b", "a")]
    beside = await Store.connect([etcd], f"{cluster}-2")
    changed = asyncio.Event()
    clusters = ModelClusters(store, FRONT_ENDS, ADAPTERS, changed=changed.set)

    def served() -> dict[str, list[str]]:
        return {
            name: [*(f.model_name for f in each.services), *(a.name for a in each.adapters)]
            for name, each in clusters.records.items()
        }

    async def until(wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not wanted():
                changed.clear()
                await changed.wait()

    for each in (store, beside):
        await each.put("services/frontend/f", msgspec.json.encode(front_end("f", "other", 9)))
    async with clusters.following():
        assert served() == {}
        for number, each in enumerate(below):
            await each.put(
                "services/frontend/f", msgspec.json.encode(front_end("f", f"m{number}", number + 1))
            )
        await until(lambda: served() == {"a": ["m1"], "b": ["m0"]})
        adapter = AdapterRecord(model="m0", name="sql", path="/a")
        await below[0].put(adapter.key, msgspec.json.encode(adapter))
        await until(lambda: served() == {"a": ["m1"], "b": ["m0", "sql"]})
        # What cannot be read is left out, alone.
        await below[1].put("services/frontend/f", b"{")
        await until(lambda: served() == {"b": ["m0", "sql"]})
        await below[0].delete("services/frontend/f")
        await until(lambda: served() == {"b": ["sql"]})
    for each in (*below, beside):
        await each.close()
