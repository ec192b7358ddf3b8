"""Checks of a model folder before anything is started with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.model_folder import ModelFolderError, require_model, require_tokenizer
from tailrace.tiny import MODEL_PATH


@pytest.mark.parametrize("model", [str(MODEL_PATH), "Qwen/Qwen3-8B", "tiny"])
def test_a_model_folder_and_hub_names_are_accepted(model: str) -> None:
    require_model(model)
    require_tokenizer(model)


@pytest.mark.parametrize("model", ["/nowhere/at-all", "./nowhere", "~/nowhere"])
def test_a_missing_folder_is_an_error(model: str) -> None:
    with pytest.raises(ModelFolderError, match=f"no folder {model}"):
        require_model(model)


def test_a_folder_without_model_or_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=f"{tmp_path} has no config.json"):
        require_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    # The tokenizer's settings, without a vocabulary.
    (tmp_path / "tokenizer_config.json").write_text("{}")
    require_model(str(tmp_path))
    with pytest.raises(ModelFolderError, match=f"{tmp_path} has no tokenizer"):
        require_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model.v3").touch()
    require_tokenizer(str(tmp_path))


def test_a_single_file_can_be_a_model(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    require_model(str(tmp_path / "tiny.gguf"))
    require_tokenizer(str(tmp_path / "tiny.gguf"))
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelFolderError, match="is a file; name the folder"):
        require_model(str(tmp_path / "config.json"))
