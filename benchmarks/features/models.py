"""What the features need beside the tiny model, made from it: an adapter, and a model that sees images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from tailrace.tiny import MODEL_PATH

_RANK: Final = 4
# Large enough to change what the model says.
_ADAPTER_SCALE: Final = 0.3
_IMAGE_TOKEN: Final = "<image>"
_IMAGE_PIXELS: Final = 56
_PATCH_PIXELS: Final = 14
_VISION_HIDDEN: Final = 32


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of the tiny model's query and value projections with random weights."""
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
    described = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def make_image_model(folder: Path) -> Path:
    """LLaVA with the tiny model as its language model and a random tower of two layers for images.

    An image is 16 tokens: 56 x 56 pixels in patches of 14.
    """
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen3Config

    folder.mkdir(parents=True, exist_ok=True)
    text = json.loads((MODEL_PATH / "config.json").read_text())
    image_token = text["vocab_size"]
    text |= {"vocab_size": image_token + 1}
    config = LlavaConfig(
        text_config=Qwen3Config(**text),
        vision_config=CLIPVisionConfig(
            hidden_size=_VISION_HIDDEN,
            intermediate_size=2 * _VISION_HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=_IMAGE_PIXELS,
            patch_size=_PATCH_PIXELS,
            projection_dim=_VISION_HIDDEN,
        ),
        image_token_index=image_token,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).float().eval()
    _take_text_weights(model)
    model.save_pretrained(folder)
    _write_processor(folder, image_token)
    return folder


def _take_text_weights(model: torch.nn.Module) -> None:
    """The tiny model's own, with a row more for the image's token."""
    state = model.state_dict()
    trained = load_file(MODEL_PATH / "model.safetensors")
    for name, tensor in trained.items():
        within = name.removeprefix("model.")
        target = "lm_head.weight" if name == "lm_head.weight" else f"model.language_model.{within}"
        if target not in state:
            raise RuntimeError(f"LLaVA has no weight {target}")
        with torch.no_grad():
            if name == "lm_head.weight":
                # Never sampled.
                state[target].fill_(-1.0)
            state[target][: tensor.shape[0]].copy_(tensor)


def _write_processor(folder: Path, image_token: int) -> None:
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL_PATH / name, folder / name)
    tokenizer = json.loads((MODEL_PATH / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        {
            "id": image_token,
            "content": _IMAGE_TOKEN,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    side = {"height": _IMAGE_PIXELS, "width": _IMAGE_PIXELS}
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": _IMAGE_PIXELS},
        "do_center_crop": True,
        "crop_size": side,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
        "resample": 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": _PATCH_PIXELS,
        "vision_feature_select_strategy": "default",
        "image_token": _IMAGE_TOKEN,
        "num_additional_image_tokens": 1,
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
