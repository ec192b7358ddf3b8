"""The commands that `tailrace up` prints can be copied, for any model and number of workers."""

from __future__ import annotations

import json
import shlex
import sysconfig
from pathlib import Path

import pytest

from tailrace.cli.up import greeting, tailrace_command
from tailrace.local.state import RunState

STATE = RunState(admin="127.0.0.1:7101", http="http://127.0.0.1:8000", model="qwen", workers=500)


def curl_bodies(text: str) -> list[dict[str, object]]:
    """Return the JSON body of every curl line."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("curl")]
    found = [shlex.split(line.replace(">/dev/null &", "")) for line in lines]
    return [json.loads(words[words.index("-d") + 1]) for words in found]


def test_workers_are_counted_not_processes() -> None:
    assert "500 workers" in greeting(STATE, Path("/logs"), "tailrace")


def test_what_a_shell_would_read_otherwise_is_quoted() -> None:
    state = RunState(admin=STATE.admin, http="http://[::1]:8000", model="qwen's", workers=1)
    text = greeting(state, Path("/logs"), "tailrace")
    assert text.count(" 'http://[::1]:8000/v1/chat/completions' ") == 2
    assert all(body["model"] == "qwen's" for body in curl_bodies(text))


@pytest.mark.parametrize("tiny", [True, False])
def test_prompts_fit_the_model(tiny: bool) -> None:
    state = RunState(admin=STATE.admin, http=STATE.http, model="qwen", workers=1, tiny=tiny)
    bodies = curl_bodies(greeting(state, Path("/logs"), "tailrace"))
    assert len(bodies) == 2
    assert all(body["model"] == "qwen" for body in bodies)
    assert all(("Count down" in json.dumps(body)) is tiny for body in bodies)


def test_a_base_model_is_asked_for_a_completion() -> None:
    state = RunState(admin=STATE.admin, http=STATE.http, model="base", workers=1, chat=False)
    text = greeting(state, Path("/logs"), "tailrace")
    assert text.count("/v1/completions") == 2 and "/v1/chat" not in text
    assert all(isinstance(body["prompt"], str) for body in curl_bodies(text))


@pytest.mark.parametrize("chat", [True, False])
def test_a_long_answer_of_a_simulated_engine_is_asked_for(chat: bool) -> None:
    state = RunState(admin=STATE.admin, http=STATE.http, model="m", workers=2, chat=chat, simulated=True)
    short, long = curl_bodies(greeting(state, Path("/logs"), "tailrace"))
    assert "min_tokens" not in short
    assert long["min_tokens"] == long["max_tokens"] == 2_000


def test_an_api_key_is_referenced_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    text = greeting(STATE, Path("/logs"), "tailrace")
    assert "Bearer $VLLM_API_KEY" in text and "s3cret" not in text


def test_the_command_is_a_path_if_it_is_not_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    (scripts / "tailrace").write_text("")
    (scripts / "tailrace").chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(scripts))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert tailrace_command() == ".venv/bin/tailrace"
    monkeypatch.setenv("PATH", str(scripts))
    assert tailrace_command() == "tailrace"
