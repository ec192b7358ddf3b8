"""Parts of a bundle: cutting, transfer in any order under any name, verification and assembly."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.bundle.install_bundle import (
    DAMAGED,
    INCOMPLETE,
    USAGE,
    BundledFile,
    BundleError,
    Manifest,
    Say,
    Staging,
    collect,
    verified,
)
from scripts.bundle.parts import cut, write_manifest, write_parts
from scripts.bundle.wheels import write_wheel

SIZES = st.lists(st.integers(1, 500), min_size=1, max_size=8)


@given(sizes=SIZES, part=st.integers(1, 200))
def test_parts_contain_every_byte_once_and_are_full_except_the_last(sizes: list[int], part: int) -> None:
    files = [(f"f{number}", size) for number, size in enumerate(sizes)]
    parts = cut(files, part)
    assert [sum(s.size for s in segments) for segments in parts[:-1]] == [part] * (len(parts) - 1)
    assert 0 < sum(s.size for s in parts[-1]) <= part
    covered: dict[str, int] = {}
    for segment in (s for segments in parts for s in segments):
        assert segment.offset == covered.get(segment.file, 0), "each file's bytes come in order"
        covered[segment.file] = segment.offset + segment.size
    assert covered == dict(files)


def _wheels(folder: Path, seed: int = 0) -> list[Path]:
    noise = random.Random(seed)
    folder.mkdir(parents=True)
    return [
        write_wheel(folder, f"noise-{n}", "1.0", "Bytes", {f"noise_{n}.bin": noise.randbytes(20_000 + n)})
        for n in range(3)
    ]


def _bundle(folder: Path, seed: int = 0) -> Manifest:
    """Write three files of 20 kB in parts of 9 kB; return their manifest."""
    sources = _wheels(folder / f"sources-{seed}", seed)
    out = folder / f"bundle-{seed}"
    out.mkdir()
    files, parts = write_parts([sources[:2], sources[2:]], out, "test", 9_000)
    manifest = Manifest("test", "3.11", "x86_64", files, parts, (), (), {})
    write_manifest(out, manifest, {})
    return manifest


def _stage(manifest: Manifest, folder: Path) -> Staging:
    return Staging(folder, manifest, manifest.files)


def test_parts_are_collected_in_any_order_under_any_name(tmp_path: Path) -> None:
    manifest = _bundle(tmp_path)
    assert Manifest.read(tmp_path / "bundle-0" / "manifest.json") == manifest
    shuffled = list(manifest.parts)
    random.Random(1).shuffle(shuffled)
    for number, part in enumerate(shuffled):
        place = tmp_path / f"carried-{number}"
        place.mkdir()
        name = part.name if number % 2 else f"renamed-{number}"
        shutil.copy(tmp_path / "bundle-0" / part.name, place / name)
        # Create a new Staging each time, like a new run of the installer.
        staging = _stage(manifest, tmp_path / "staging")
        collect([place], manifest, staging, Say())
        assert part not in staging.missing
        del staging
    staging = _stage(manifest, tmp_path / "staging")
    assert staging.missing == []
    verified(manifest.files, staging)
    for file in manifest.files:
        assert staging.path(file).read_bytes() == (tmp_path / "sources-0" / file.name).read_bytes()


@pytest.mark.parametrize("damage", ["a byte", "short", "long"])
def test_a_damaged_part_is_named_and_can_be_replaced(tmp_path: Path, damage: str) -> None:
    manifest = _bundle(tmp_path)
    bad = tmp_path / "bundle-0" / manifest.parts[2].name
    good = bad.read_bytes()
    bad.write_bytes(
        {"a byte": good[:100] + b"?" + good[101:], "short": good[:-1], "long": good + b"?"}[damage]
    )
    staging = _stage(manifest, tmp_path / "staging")
    with pytest.raises(BundleError, match=bad.name) as raised:
        collect([tmp_path / "bundle-0"], manifest, staging, Say())
    assert raised.value.status == DAMAGED
    assert [part.name for part in staging.missing] == [bad.name], "every other part was taken"
    bad.write_bytes(good)
    collect([bad], manifest, staging, Say())
    verified(manifest.files, staging)


def test_other_files_are_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = _bundle(tmp_path)
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    staging = _stage(manifest, tmp_path / "staging")
    collect([other], manifest, staging, Say())
    assert "notes.txt is no part" in capsys.readouterr().out
    with pytest.raises(BundleError, match="no such file"):
        collect([tmp_path / "nowhere"], manifest, staging, Say())


def test_a_file_damaged_on_disk_is_requested_again(tmp_path: Path) -> None:
    manifest = _bundle(tmp_path)
    staging = _stage(manifest, tmp_path / "staging")
    collect([tmp_path / "bundle-0"], manifest, staging, Say())
    staging.path(manifest.files[1]).write_bytes(b"?")
    with pytest.raises(BundleError) as raised:
        verified(manifest.files, staging)
    assert raised.value.status == INCOMPLETE
    assert staging.missing, "its parts are needed again"
    collect([tmp_path / "bundle-0"], manifest, staging, Say())
    verified(manifest.files, staging)


def test_a_new_bundle_needs_only_the_parts_that_changed(tmp_path: Path) -> None:
    manifest = _bundle(tmp_path)
    needed = [manifest.files[2]]
    staging = Staging(tmp_path / "staging", manifest, needed)
    assert {s.file for part in staging.missing for s in part.segments} == {needed[0].name}, (
        "it is in a separate group"
    )


def test_remains_of_a_longer_file_are_overwritten(tmp_path: Path) -> None:
    manifest = _bundle(tmp_path)
    staging = _stage(manifest, tmp_path / "staging")
    staging.path(manifest.files[0]).write_bytes(bytes(50_000))
    collect([tmp_path / "bundle-0"], manifest, staging, Say())
    verified(manifest.files, staging)


def test_two_installers_do_not_share_a_folder(tmp_path: Path) -> None:
    manifest = _bundle(tmp_path)
    staging = _stage(manifest, tmp_path / "staging")
    with pytest.raises(BundleError, match="in use"):
        _stage(manifest, tmp_path / "staging")
    del staging


@pytest.mark.parametrize("name", ["../evil", "a/b", "/etc/passwd", "..", ""])
def test_a_manifest_cannot_write_outside_its_folder(tmp_path: Path, name: str) -> None:
    manifest = Manifest("test", "3.11", "x86_64", (BundledFile(name, 1, "00", 1),), (), (), (), {})
    with pytest.raises(BundleError, match="no plain file name") as raised:
        Manifest.read(write_manifest(tmp_path, manifest, {}))
    assert raised.value.status == USAGE


def test_an_invalid_manifest_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    for text in ("", "{}", '{"format": 7}', "[]"):
        path.write_text(text)
        with pytest.raises(BundleError, match="manifest"):
            Manifest.read(path)
