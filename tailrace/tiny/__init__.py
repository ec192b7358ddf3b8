"""The reasoning model that ships with Tailrace: small enough to run anywhere, reliable enough to be checked.

A fleet can be tested end to end only with a model that thinks before it answers, whose lengths the prompt
determines, and whose every token a program can predict. No published model is all of that and this small, so
this package contains its own.
"""

from pathlib import Path
from typing import Final

MODEL_PATH: Final[Path] = Path(__file__).resolve().parent / "model"
"""Folder to give to vLLM as ``model``."""

PREDICTOR_PATH: Final[Path] = Path(__file__).resolve().parent / "predictor.safetensors"
"""Its length predictor (docs/predictor.md)."""

REASONING_PARSER: Final[str] = "qwen3"
"""Name of the vLLM reasoning parser that splits the model's thought from its answer."""

__all__ = ["MODEL_PATH", "PREDICTOR_PATH", "REASONING_PARSER"]
