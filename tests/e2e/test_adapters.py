"""An adapter loaded behind one of two front ends, by vLLM."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.features.models import make_adapter
from tests.harness.fleet import Fleet
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_both_front_ends_serve_an_adapter_that_one_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    folder, given = make_adapter(tmp_path / "a", 1), make_adapter(tmp_path / "given", 2)
    fleet = Fleet(tmp_path, "vllm")

    def paths(name: str) -> dict[str, str]:
        cards = httpx.get(f"{fleet.urls[name]}/v1/models", timeout=WAIT_S).json()["data"]
        return {card["id"]: card["root"] for card in cards}

    def change(name: str, action: str, **request: object) -> tuple[int, str]:
        response = httpx.post(f"{fleet.urls[name]}/v1/{action}_lora_adapter", json=request, timeout=WAIT_S)
        return response.status_code, response.text

    def load(name: str, adapter: str, path: Path, in_place: bool = False) -> tuple[int, str]:
        return change(name, "load", lora_name=adapter, lora_path=str(path), load_inplace=in_place)

    def ask(name: str) -> tuple[int, str]:
        body = {"model": "a", "prompt": "one two", "max_tokens": 8, "temperature": 0}
        response = httpx.post(f"{fleet.urls[name]}/v1/completions", json=body, timeout=WAIT_S)
        text = response.text if response.is_error else response.json()["choices"][0]["text"]
        return response.status_code, text

    try:
        fleet.start_control()
        options = ["--enable-lora", "--max-loras", "4", "--kv-blocks", "512"]
        fleet.start_worker("w0", options, wait=False)
        for name in ("f0", "f1"):
            modules = ["--lora-modules", f"given={given}"] if name == "f1" else []
            fleet.start_frontend(name=name, options=["--enable-lora", *modules], wait=False)
        for name in ("f0", "f1"):
            fleet.wait_frontend(name)
        status, text = load("f0", "a", folder)
        assert status == 200, text
        wait_until(lambda: "a" in paths("f1"), "the other front end")
        answers = [ask(name) for name in ("f0", "f1") * 4]
        assert {status for status, _ in answers} == {200}, answers
        assert len(set(answers)) == 1
        status, text = load("f0", "a", folder, in_place=True)
        assert status == 200, text
        assert ask("f0") == ask("f1") == answers[0]

        assert load("f0", "given", folder)[0] == 200
        skipped = 'what="adapter under a taken name"'
        wait_until(lambda: fleet.metric("f1", "tailrace_unreadable_total", skipped) == 1, "the record")
        assert fleet.metric("f1", "tailrace_unreadable_records", skipped) == 1
        assert (paths("f0")["given"], paths("f1")["given"]) == (str(folder), str(given))
        for in_place in (False, True):
            status, text = load("f1", "given", folder, in_place)
            assert status == 400 and "has already been loaded" in text
        assert change("f1", "unload", lora_name="given")[0] == 400

        status, text = change("f1", "unload", lora_name="a")
        assert status == 200, text
        wait_until(lambda: "a" not in paths("f0"), "the other front end")
        assert [ask(name)[0] for name in ("f0", "f1")] == [404, 404]
    finally:
        fleet.close()
