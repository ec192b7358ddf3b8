"""`tailrace up -f` and `tailrace apply`: a cluster follows its file while it serves."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tailrace.local.plan import Tier
from tailrace.tiny import MODEL_PATH
from tests.fleet.files import BEHIND_EDGES, PODS, TWO_HOSTS, changed
from tests.harness.processes import FAST_FRONT, wait_until
from tests.harness.rollouts import Load
from tests.harness.working_folder import WorkingFolder

pytestmark = pytest.mark.fleet

PROMPTS = ["Count down from 30 with wxyz, then from 20."]


class FleetFolder(WorkingFolder):
    """A folder with a fleet.yaml."""

    def write(self, **fields: Any) -> None:
        """Write the file; `fields`: those of the model, and policy and slo."""
        model = {
            "model": str(MODEL_PATH),
            "engine": "simulated",
            "front": FAST_FRONT,
            "http": f"127.0.0.1:{self.port}",
            "replicas": fields.pop("replicas", 2),
            "flags": {"served-model-name": "tiny", "sim": ["speed=0.5"], **fields.pop("flags", {})},
        }
        (self.path / "fleet.yaml").write_text(yaml.safe_dump({"models": [model], **fields}))

    def apply(self, *arguments: str) -> str:
        """Apply the file; return what is printed."""
        result = self.tailrace("apply", "-f", "fleet.yaml", *arguments)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def figures(self, *command: str) -> Any:
        """Return what a command prints with `-o json`."""
        return json.loads(self.tailrace(*command, "-o", "json").stdout)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[FleetFolder]:
    place = FleetFolder(tmp_path)
    yield place
    place.tailrace("down")


def test_a_cluster_follows_its_file_under_load(here: FleetFolder) -> None:
    here.write(
        policy={"name": "pascal", "parameters": {"quantum_tokens": 250, "pacer": False}}, slo={"ttft": "1s"}
    )
    up = here.tailrace("up", "-f", "fleet.yaml")
    assert up.returncode == 0, up.stderr
    assert here.apply() == "nothing to change: the cluster is as the file says\n"
    load = Load(f"http://127.0.0.1:{here.port}", PROMPTS, {}, 4)
    with load:
        wait_until(lambda: load.count() >= 4, "the first answers")

        # A parameter, an instance more.
        here.write(
            replicas=3, policy={"name": "pascal", "parameters": {"quantum_tokens": 300, "pacer": False}}
        )
        shown = here.apply("--dry-run")
        assert "pascal pacer=false quantum_tokens=250 -> pascal pacer=false quantum_tokens=300" in shown
        assert shown.splitlines()[-1] == "worker-2  start"
        assert len(here.figures("get", "instances")["instances"]) == 2
        here.apply("--yes")
        assert len(here.figures("get", "instances")["instances"]) == 3

        # Another policy, other flags of the workers, and one less: requests move away from each.
        here.write(
            replicas=2, policy={"name": "tailrace"}, slo={"ttft": "1500ms"}, flags={"sim": ["speed=1"]}
        )
        shown = here.apply("--yes")
        assert "slo       ttft 1 -> 1.5" in shown
        assert "worker-1  restart: -speed=0.5 +speed=1" in shown
        assert shown.splitlines()[-2:] == ["worker-2  stop", "applied"]
        seen = load.count()
        wait_until(lambda: load.count() >= seen + 4, "answers of the rest")
        load.stop()
    assert load.errors == []
    assert len({chat.answer for _, chat in load.answers}) == 1
    assert here.apply() == "nothing to change: the cluster is as the file says\n"

    # What would not start is refused before anything stops.
    for wrong, reason in (
        ({"sim": ["speed=1"], "max-num-seqs": "abc"}, "--max-num-seqs"),
        ({"sim": ["speed=1"], "max-modle-len": 4096}, "--max-modle-len"),
    ):
        here.write(policy={"name": "tailrace"}, flags=wrong)
        for how in ("--dry-run", "--yes"):
            refused = here.tailrace("apply", "-f", "fleet.yaml", how)
            assert refused.returncode == 2 and reason in refused.stderr, refused.stdout + refused.stderr
    port = here.port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        here.port = taken.getsockname()[1]
        here.write(policy={"name": "tailrace"}, flags={"sim": ["speed=1"]})
        refused = here.tailrace("apply", "-f", "fleet.yaml", "--yes")
        assert refused.returncode == 2 and "the port is in use" in refused.stderr, refused.stderr
    here.port = port
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200

    here.write(replicas=2, policy={"name": "tailrace"}, flags={"sim": ["speed=1"], "encrypt-kv": True})
    asked = here.tailrace("apply", "-f", "fleet.yaml")
    assert asked.returncode == 2
    assert "--yes: needed where nobody can be asked" in asked.stderr

    state = here.folder.read()
    assert state is not None
    (etcd,) = (part for part in state.parts if part.tier is Tier.ETCD)
    os.kill(etcd.identity.pid, signal.SIGKILL)
    wait_until(lambda: not etcd.identity.alive(), "etcd to end")
    ended = here.tailrace("apply", "-f", "fleet.yaml", "--yes")
    assert ended.returncode == 1 and "tailrace restart etcd" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("up", "-f", "fleet.yaml", "--workers", "2"), "--workers: with --file, the file says it"),
        (("up", "-f", "fleet.yaml", "--dtype", "float32"), "--dtype: with --file, the file says it"),
        (("up", "-f", "fleet.yaml", "--on", "c"), "--on: 'c' is none of the file's hosts (none)"),
        (("up", "--on", "c"), "--on: names a host of a --file"),
        (("up", "-f", "none.yaml"), "none.yaml: No such file or directory"),
        (("apply", "-f", "fleet.yaml"), "no cluster is running in this folder; tailrace up -f starts one"),
        (("render", "systemd", "-f", "fleet.yaml"), "hosts: there are none; tailrace up -f starts it"),
    ],
)
def test_wrong_usage(here: FleetFolder, arguments: tuple[str, ...], message: str) -> None:
    here.write()
    result = here.tailrace(*arguments)
    assert result.returncode in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("kind", "content"), [("systemd", TWO_HOSTS), ("kubernetes", PODS), ("helm", PODS)])
def test_keys_that_front_ends_cannot_read_are_not_handed_out(
    here: FleetFolder, kind: str, content: dict[str, object]
) -> None:
    (here.path / "fleet.yaml").write_text(yaml.safe_dump(content))
    (here.path / "keys.json").write_bytes(b"\xff")
    result = here.tailrace("render", kind, "-f", "fleet.yaml", "--out", "made")
    assert result.returncode == 1
    assert (
        "keys.json: no usable file of API keys (JSON is malformed" in result.stderr
        and "Traceback" not in result.stderr
    )
    assert not (here.path / "made").exists()


@pytest.mark.parametrize("kind", ["systemd", "compose", "processes"])
def test_a_folder_has_what_an_edge_needs(here: FleetFolder, kind: str) -> None:
    content = changed(BEHIND_EDGES, "models.0.frontends", {"b": 1})
    (here.path / "fleet.yaml").write_text(yaml.safe_dump(content))
    (here.path / "keys.json").write_text('{"tenants": [], "keys": []}')
    result = here.tailrace("render", kind, "-f", "fleet.yaml", "--out", "made")
    assert result.returncode == 0, result.stderr
    # On host a there is no front end.
    own = here.path / "made" / "a"
    assert (own / "keys.json").exists()
    assert (own / "tls/issued/edge/edge-a/tls.key").exists() and not (own / "tls/issued/frontend").exists()
    if kind == "compose":
        service = yaml.safe_load((own / "compose.yaml").read_text())["services"]["edge-a"]
        assert service["image"].startswith("tailrace-control:") and service["stop_grace_period"] == "330s"
    if kind == "systemd":
        assert "serve edge" in (own / "units/tailrace-edge-a.service").read_text()


def test_flags_are_checked_with_the_file(here: FleetFolder) -> None:
    here.write(flags={"kv-blocks": 1})
    result = here.tailrace("config", "check", "-f", "fleet.yaml")
    assert result.returncode == 2
    assert "models[0].flags" in result.stderr and "--kv-blocks" in result.stderr
    here.write(flags={"nnodes": 2})
    result = here.tailrace("config", "check", "-f", "fleet.yaml")
    assert "--nnodes: tailrace serve worker and tailrace serve ranks" in result.stderr


def test_what_no_host_can_run_is_refused(here: FleetFolder) -> None:
    content = changed(TWO_HOSTS, "models.0.flags.tensor-parallel-size", 8)
    (here.path / "fleet.yaml").write_text(yaml.safe_dump(content))
    result = here.tailrace("config", "check", "-f", "fleet.yaml")
    assert result.returncode == 2
    assert "models[0].replicas: an instance takes 8 GPUs, and no host has as many" in result.stderr
