"""A model's folder, checked before anything is started with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.model_folder import ModelFolderError, require_model, require_tokenizer
from tailrace.tiny import MODEL_PATH


@pytest.mark.parametrize("model", [str(MODEL_PATH), "Qwen/Qwen3-8B", "tiny"])
def test_a_model_and_names_of_a_hub_are_accepted(model: str) -> None:
    require_model(model)
    require_tokenizer(model)


@pytest.mark.parametrize("model", ["/nowhere/at-all", "./nowhere", "~/nowhere"])
def test_a_path_without_a_folder(model: str) -> None:
    with pytest.raises(ModelFolderError, match=f"no folder {model}"):
        require_model(model)


def test_a_folder_without_a_model_or_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=f"{tmp_path} has no config.json"):
        require_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    # Says how to convert, but not between what.
    (tmp_path / "tokenizer_config.json").write_text("{}")
    require_model(str(tmp_path))
    with pytest.raises(ModelFolderError, match=f"{tmp_path} has no tokenizer"):
        require_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model.v3").touch()
    require_tokenizer(str(tmp_path))


def test_a_single_file_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    require_model(str(tmp_path / "tiny.gguf"))
    require_tokenizer(str(tmp_path / "tiny.gguf"))
