"""Create adapters of the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from tailrace.tiny import MODEL_PATH

_RANK: Final = 4
# Large enough to change the model's answers.
_ADAPTER_SCALE: Final = 0.3


def make_adapter(folder: Path, seed: int) -> Path:
    """Create a LoRA adapter of the tiny model's query and value projections with random weights; return its
    folder."""
    config = json.loads((MODEL_PATH / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    widths = {
        "q_proj": config["num_attention_heads"] * head,
        "v_proj": config["num_key_value_heads"] * head,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(_RANK, hidden, generator=generator)
            up = torch.randn(width, _RANK, generator=generator)
            tensors[f"{stem}.lora_A.weight"] = down * _ADAPTER_SCALE
            tensors[f"{stem}.lora_B.weight"] = up * _ADAPTER_SCALE
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config_json = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config_json))
    return folder
