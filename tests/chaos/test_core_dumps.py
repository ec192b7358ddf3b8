"""Core dumps of crashed processes, and the native stacks in them."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.core_dumps import native_stack, take_core


def crash(folder: Path) -> None:
    """Crash a process in a native library; its core dump is in `folder` if the machine keeps it there."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    program = (
        f"import ctypes, resource; resource.setrlimit(resource.RLIMIT_CORE, ({hard}, {hard})); "
        "ctypes.string_at(1)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, check=False)
    assert done.returncode == -signal.SIGSEGV


def test_a_crash_leaves_its_native_stack(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    crash(folder)
    core = take_core(folder, tmp_path / "worker-0.1.core")
    if core is None or shutil.which("gdb") is None:
        pytest.skip("no gdb, or this machine keeps core dumps elsewhere")
    assert core == tmp_path / "worker-0.1.core" and not list(folder.iterdir())
    stack = native_stack(core)
    assert "#0" in stack and "string_at" in stack and "rip" in stack


def test_other_files_are_no_core_dumps(tmp_path: Path) -> None:
    (tmp_path / "core").write_text("not a core dump")
    (tmp_path / "core_dumps.py").write_text("")
    assert take_core(tmp_path, tmp_path / "moved") is None
    assert (tmp_path / "core").exists()
