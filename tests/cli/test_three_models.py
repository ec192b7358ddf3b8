"""Three models of other architectures at one address, with adapters and tenants, changed while they serve."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import yaml

from tailrace.tiny import MODEL_PATH
from tests.features.models import make_adapter
from tests.harness.processes import wait_until
from tests.harness.rollouts import changed_model
from tests.harness.working_folder import WorkingFolder
from tests.models.architectures import write_model

pytestmark = [pytest.mark.fleet, pytest.mark.slow, pytest.mark.vllm]

# Three engines and three API servers import vLLM, on two cores.
_UP_S: Final = 900.0
# Some virtual machines show instructions for bfloat16 that they do not carry out.
_SMALL: Final[dict[str, Any]] = {
    "max-model-len": 1024,
    "max-num-seqs": 8,
    "kv-blocks": 256,
    "dtype": "float32",
}
_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def other_model(name: str, folder: Path) -> Path:
    """Write a model of this architecture, with the tiny model's tokenizer."""
    path = write_model(name, folder)
    for each in _TOKENIZER:
        shutil.copy(MODEL_PATH / each, path)
    return path


class Clients:
    """A client of each name, which sends one request after the other without retries."""

    def __init__(self, url: str, keys: dict[str, str]) -> None:
        """`keys`: by the name of a model or adapter."""
        self._apis = {
            name: openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=600, max_retries=0)
            for name, key in keys.items()
        }
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.answers: dict[str, list[str]] = {name: [] for name in keys}
        self.errors: list[str] = []

    def ask(self, name: str, tokens: int = 48) -> str:
        """Return the text of one streamed answer."""
        chunks = self._apis[name].completions.create(
            model=name, prompt="Once", max_tokens=tokens, temperature=0, stream=True,
            extra_body={"min_tokens": tokens, "ignore_eos": True},
        )  # fmt: skip
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    def start(self, *names: str) -> None:
        """Send requests to these from now on."""
        for name in names:
            thread = threading.Thread(target=self._run, args=(name,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Wait until the requests have ended."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def more(self, *names: str) -> None:
        """Wait until each of these has two answers more."""
        seen = {name: len(self.answers[name]) for name in names}
        wait_until(lambda: all(len(self.answers[name]) >= seen[name] + 2 for name in names), "answers")

    def _run(self, name: str) -> None:
        while not self._stopped.is_set():
            try:
                self.answers[name].append(self.ask(name))
            except openai.OpenAIError as error:
                self.errors.append(f"{name}: {error}")
                return


@pytest.fixture
def here(tmp_path: Path) -> Iterator[WorkingFolder]:
    place = WorkingFolder(tmp_path)
    yield place
    place.tailrace("down", timeout_s=_UP_S)


def key_of(here: WorkingFolder, tenant: str, *models: str) -> str:
    """Make a tenant's key."""
    made = here.tailrace("keys", "make", tenant, "--file", "keys.json", "--models", ",".join(models))
    assert made.returncode == 0, made.stderr
    return made.stdout.split()[-1]


@contextmanager
def worker(here: WorkingFolder, model: Path, name: str) -> Iterator[None]:
    """Run one more worker in the fleet's cluster for the block."""
    flags = [word for flag, value in _SMALL.items() for word in (f"--{flag}", str(value))]
    command = here.command("serve", "worker", str(model), "--etcd", here.state().etcd, "--id", name, *flags)
    with (here.path / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=here.path, env=here.environment(), stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=_UP_S)


def test_three_models_change_while_they_serve(here: WorkingFolder) -> None:
    began_s = time.monotonic()

    def timed(what: str) -> None:
        print(f"{time.monotonic() - began_s:6.1f} s  {what}", flush=True)

    def done(*command: str) -> str:
        result = here.tailrace(*command, timeout_s=_UP_S)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    gemma, moe = (other_model(name, here.path / "models") for name in ("gemma3", "qwen3moe"))
    lora = {f"red={make_adapter(here.path / 'red', 1)}", f"blue={make_adapter(here.path / 'blue', 2)}"}
    files: dict[str, dict[str, Any]] = {
        "tiny": {
            "model": str(MODEL_PATH),
            "policy": {"name": "pascal"},
            "flags": {"enable-lora": True, "max-loras": 3, "lora-modules": sorted(lora), **_SMALL},
        },
        "gemma": {"model": str(gemma), "autoscale": {"max": 1, "cooldown": "5s"}, "flags": {**_SMALL}},
        "moe": {"model": str(moe), "flags": {**_SMALL}},
    }
    for name, content in files.items():
        content["flags"]["served-model-name"] = name
        content.setdefault("replicas", 1)
    ours, theirs = key_of(here, "ours", "tiny", "red", "blue"), key_of(here, "theirs", "gemma", "moe")
    fleet = {"http": f"127.0.0.1:{here.port}", "keys": "keys.json", "models": [*files.values()]}

    def write() -> None:
        (here.path / "fleet.yaml").write_text(yaml.safe_dump(fleet))

    write()
    timed("the models are written")
    done("up", "-f", "fleet.yaml")
    timed("up")
    keys = dict.fromkeys(("tiny", "red", "blue"), ours) | dict.fromkeys(("gemma", "moe"), theirs)
    clients = Clients(f"http://127.0.0.1:{here.port}", keys)
    first = {name: clients.ask(name) for name in keys}
    assert len(set(first.values())) == len(keys)
    timed("each name has answered, each otherwise")
    with pytest.raises(openai.APIStatusError):
        Clients(f"http://127.0.0.1:{here.port}", {"tiny": theirs}).ask("tiny")

    clients.start("tiny", "red", "blue", "moe")
    clients.more("tiny", "red", "blue", "moe")

    def workers(prefix: str) -> list[str]:
        parts = here.state().parts
        return [part.name for part in parts if part.name.startswith(prefix) and part.identity.alive()]

    wait_until(lambda: not workers("gemma-worker"), "gemma to go to zero")
    timed("gemma is at zero")
    asked_s = time.monotonic()
    assert clients.ask("gemma") == first["gemma"]
    timed(f"gemma has answered, {time.monotonic() - asked_s:.1f} s after it was asked at zero")

    files["tiny"]["replicas"] = 2
    files["tiny"]["policy"] = {"name": "least_loaded"}
    write()
    printed = done("apply", "-f", "fleet.yaml", "--yes")
    assert "tiny-worker-1" in printed and "policy of tiny" in printed
    timed("apply: tiny has one instance more and another policy")

    newer = changed_model(here.path / "moe-2", moe)
    with worker(here, newer, "moe-new-0"):
        wait_until(lambda: "moe-new-0" in done("get", "instances"), "the new worker")
        timed("an instance with moe's new weights")
        done("rollout", "start", "moe", "--to", str(newer), "--min-warm", "1")
        timed("moe is rolled out")
        clients.more("moe", "tiny", "red", "blue")
        clients.stop()
        assert clients.errors == []
        second = clients.ask("moe")
        assert second != first["moe"] and set(clients.answers["moe"]) == {first["moe"], second}
        for name in ("tiny", "red", "blue"):
            assert set(clients.answers[name]) == {first[name]}
        timed(f"0 errors; answers: { {name: len(each) for name, each in clients.answers.items()} }")
        done("rollout", "undo", "moe")
