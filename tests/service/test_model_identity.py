"""Identity of models and adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tailrace.model_identity import AdapterVersions, ModelIdentity, covers, identify_model
from tailrace.tiny import MODEL_PATH


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the tiny model in another folder."""
    return Path(shutil.copytree(MODEL_PATH, tmp_path / "copy"))


def test_a_model_is_identified_by_the_content_of_its_folder(copy: Path) -> None:
    assert identify_model(str(copy)) == identify_model(str(MODEL_PATH))
    config = json.loads((copy / "config.json").read_text())
    config = dict(reversed(config.items())) | {"_name_or_path": "elsewhere", "transformers_version": "9"}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "chat_template.jinja").write_text("another")
    assert identify_model(str(copy)) == identify_model(str(MODEL_PATH))


def test_other_weights_are_another_model_with_the_same_text(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    tiny, other = identify_model(str(MODEL_PATH)), identify_model(str(copy))
    assert (other.text, other.weights == tiny.weights) == (tiny.text, False)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_another_configuration_or_tokenizer_is_another_text(copy: Path, name: str) -> None:
    content = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(content | {"added": 1}))
    assert identify_model(str(copy)).text != identify_model(str(MODEL_PATH)).text


def test_without_weights_only_the_text_is_identified(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert identify_model(str(copy)) == ModelIdentity(identify_model(str(MODEL_PATH)).text)


def test_a_hub_model_is_identified_by_name_and_revision() -> None:
    assert identify_model("org/model") == identify_model("org/model")
    assert identify_model("org/model") != identify_model("org/model", "v2")
    assert identify_model("org/model").weights


def test_a_key_matches_its_extensions() -> None:
    exact = ModelIdentity("t", "w", "bf16")
    assert all(covers(key, exact.key) for key in ("", "t", "t:w", "t:w:bf16"))
    assert not any(covers(key, exact.key) for key in ("x", "t:v", "t:w:fp8", "t:w:bf", "t:wx", "tt"))
    assert [ModelIdentity("t").key, ModelIdentity("t", "w").key] == ["t", "t:w"]


def test_the_version_of_an_adapter_depends_on_its_files(tmp_path: Path) -> None:
    versions, folder = AdapterVersions(), tmp_path / "adapter"
    assert versions.of(str(folder)) == versions.of("somebody/adapter") == ""
    folder.mkdir()
    (folder / "README.md").write_text("no weights")
    assert versions.of(str(folder)) == ""
    (folder / "adapter_config.json").write_text("{}")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"a" * 100)
    first = versions.of(str(folder))
    assert len(first) == 16
    assert versions.of(str(folder)) == AdapterVersions().of(str(folder)) == first
    weights.write_bytes(b"b" * 101)
    second = versions.of(str(folder))
    assert second not in ("", first)
    # Equal files elsewhere have the same version.
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert versions.of(str(copy)) == second
    (folder / "adapter_config.json").write_text('{"r": 8}')
    assert versions.of(str(folder)) not in ("", first, second)
