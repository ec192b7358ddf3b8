"""The installer as users run it: one file, no network, parts in several steps, and the environment."""

from __future__ import annotations

import ensurepip
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bundle import install_bundle
from scripts.bundle.install_bundle import DAMAGED, INCOMPLETE, USAGE, Manifest, sha256_of
from scripts.bundle.parts import write_manifest, write_parts
from scripts.bundle.target import running_python
from scripts.bundle.wheels import write_wheel
from tests.waiting import WAIT_S


def _make(
    out: Path,
    text: str = "1",
    python: str = running_python(),
    machine: str = platform.machine(),
    host: tuple[str, ...] = (),
    checks: tuple[str, ...] = ("module_a", "module_b"),
) -> Path:
    """Return a bundle of two modules and the pip that is included in Python."""
    sources = out / "sources"
    sources.mkdir(parents=True)
    bundled = Path(ensurepip.__file__).parent / "_bundled"
    (pip,) = bundled.glob("pip-*.whl")
    first = write_wheel(sources, "module-a", "1.0", "A", {"module_a.py": b"value = 'a'\n"})
    own = write_wheel(sources, "module-b", "1.0", "B", {"module_b.py": f"value = {text!r}\n".encode()})
    bundle = out / "bundle"
    bundle.mkdir()
    astray = out / "astray"
    astray.mkdir()
    (astray / "module_a.py").write_text("raise ImportError('astray')\n")
    files, parts = write_parts([[first, pip], [own]], bundle, "test", 1_000_000)
    manifest = Manifest("test", python, machine, files, parts, host, checks, {"TAILRACE_TEST": "it's set"})
    write_manifest(bundle, manifest, {})
    shutil.copy(install_bundle.__file__, bundle)
    return bundle


def _install(bundle: Path, into: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(bundle / "install_bundle.py"), "--into", str(into)]
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        # This index does not exist and must not be used.
        env={
            "PATH": "/usr/bin:/bin",
            "PIP_INDEX_URL": "http://127.0.0.1:9/",
            "PIP_REQUIRE_HASHES": "1",
            "PYTHONPATH": str(bundle.parent / "astray"),
        },
    )


def _value(environment: Path, module: str) -> str:
    command = [str(environment / "bin" / "python"), "-I", "-c", f"import {module}; print({module}.value)"]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout.strip()


def test_parts_are_installed_incrementally_and_updates_need_only_changes(tmp_path: Path) -> None:
    bundle = _make(tmp_path / "one")
    into = tmp_path / "environment"
    parts = sorted(bundle.glob("test.part-*"))
    assert len(parts) >= 3
    first = _install(bundle, into, parts[1])
    assert first.returncode == INCOMPLETE
    assert "test.part-001" in first.stderr
    assert "test.part-002" not in first.stderr
    last = _install(bundle, into, *(part for part in parts if part is not parts[1]))
    assert last.returncode == 0, last.stderr
    assert "ready" in last.stdout
    assert (_value(into, "module_a"), _value(into, "module_b")) == ("a", "1")
    assert not (tmp_path / "environment.parts").exists()
    assert "installed already" in _install(bundle, into).stdout
    newer = _make(tmp_path / "two", "2")
    update = _install(newer, into, sorted(newer.glob("test.part-*"))[-1])
    assert update.returncode == 0, update.stderr
    assert (_value(into, "module_a"), _value(into, "module_b")) == ("a", "2")


def test_the_environments_python_has_the_manifests_variables_unless_they_are_set(tmp_path: Path) -> None:
    into = tmp_path / "environment"
    assert _install(_make(tmp_path / "one"), into).returncode == 0
    command = [str(into / "bin" / "python"), "-c", "import os; print(os.environ['TAILRACE_TEST'])"]
    values = [
        subprocess.run(
            command, capture_output=True, text=True, timeout=WAIT_S, check=True, env={**os.environ, **given}
        ).stdout.strip()
        for given in ({}, {"TAILRACE_TEST": "own"})
    ]
    assert values == ["it's set", "own"]


def test_an_incompatible_host_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    into = tmp_path / "environment"
    cases: dict[str, Path] = {
        "is for Python 3.99": _make(tmp_path / "python", python="3.99"),
        "is for Linux on pdp11": _make(tmp_path / "machine", machine="pdp11"),
        "has no no_such_module": _make(tmp_path / "host", host=("no_such_module",)),
    }
    for message, bundle in cases.items():
        refused = _install(bundle, into)
        assert (refused.returncode, message in refused.stderr) == (USAGE, True), refused.stderr
    assert not into.exists()
    assert not (tmp_path / "environment.parts").exists()


def test_an_unexpected_manifest_is_refused(tmp_path: Path) -> None:
    bundle = _make(tmp_path / "one")
    refused = _install(bundle, tmp_path / "environment", "--expect", "00")
    assert (refused.returncode, "--expect" in refused.stderr) == (DAMAGED, True)
    assert sha256_of(bundle / "manifest.json") in refused.stdout


@pytest.mark.slow
def test_packages_of_the_bundle_take_precedence_over_the_hosts(tmp_path: Path) -> None:
    host = tmp_path / "host"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(host)], check=True, timeout=WAIT_S)
    (site,) = (host / "lib").glob("python3.*/site-packages")
    for name in ("module_a", "of_host"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("value = 'host'\n")
    bundle = _make(tmp_path / "one", host=("of_host",), checks=("module_a", "of_host", "not_there"))
    into = tmp_path / "environment"
    result = _install(bundle, into, "--python", str(host / "bin" / "python"))
    assert result.returncode == DAMAGED, "one of the modules cannot be imported"
    assert "not_there" in result.stdout
    assert (_value(into, "module_a"), _value(into, "of_host")) == ("a", "host")


@pytest.mark.slow
def test_a_cpu_bundle_serves_the_tiny_model_without_a_network(tmp_path: Path) -> None:
    """Downloads about 1 GB the first time, into .run/bundle."""
    root = Path(install_bundle.__file__).resolve().parents[2]
    # fmt: off
    subprocess.run(
        [sys.executable, "-m", "scripts.bundle", "--engine", "cpu", "--out", str(tmp_path)],
        cwd=root, check=True, timeout=1200,
    )
    # fmt: on
    (bundle,) = tmp_path.glob("tailrace-cpu-*")
    into = tmp_path / "environment"
    script = Path(__file__).with_name("serve_offline.sh")
    offline = ["unshare", "--map-root-user", "--net"]
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "TAILRACE_RUN_DIR": str(tmp_path / "run")}
    for command in (
        [sys.executable, "-I", str(bundle / "install_bundle.py"), "--into", str(into)],
        ["bash", str(script), str(into)],
    ):
        result = subprocess.run(
            [*offline, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert result.returncode == 0, result.stdout + result.stderr
    assert '"completion_tokens":8' in result.stdout
    for large in (into, bundle):
        shutil.rmtree(large)  # 4.5 GB that pytest would keep
