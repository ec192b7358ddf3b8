"""A tiny random vision model, and images for it.

BLIP-2 is an architecture that vLLM serves without torchvision, neither for its processor nor for its vision
tower. Its language model is OPT.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from tailrace.tiny import MODEL_PATH

IMAGE_TOKEN: Final = "<image>"
# Tokens per image.
_QUERIES: Final = 8
_PIXELS: Final = 28
_WIDTH: Final = 128
_SEED: Final = 20261122
_CONTEXT: Final = 2048
_TEMPLATE: Final = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def make_vision_model(folder: Path) -> Path:
    """Write the model to the folder; every process creates the same one."""
    import torch
    from transformers import AutoTokenizer, Blip2Config, Blip2ForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    tower = {
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Blip2Config(
        vision_config={**tower, "image_size": _PIXELS, "patch_size": 14},
        qformer_config={**tower, "encoder_hidden_size": _WIDTH, "vocab_size": len(tokenizer)},
        text_config={
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "hidden_size": _WIDTH,
            "word_embed_proj_dim": _WIDTH,
            "ffn_dim": 2 * _WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": _CONTEXT,
            "bos_token_id": 257,
            "eos_token_id": 258,
            "pad_token_id": 256,
        },
        num_query_tokens=_QUERIES,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_text_hidden_size=_WIDTH,
    )
    torch.manual_seed(_SEED)
    model = Blip2ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        # With the default initialization all images look alike to it.
        if parameter.dim() > 1:
            parameter.data.normal_(std=1.0 if name.startswith("language_projection") else 0.3)
    model.save_pretrained(folder)
    sizes = {"height": _PIXELS, "width": _PIXELS}
    image_processor = {"image_processor_type": "BlipImageProcessor", "size": sizes, "do_convert_rgb": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": _QUERIES}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    shutil.copy(MODEL_PATH / "generation_config.json", folder)
    return folder


def image_url(number: int) -> str:
    """Return a different image for each number, as a data URL."""
    pixels = np.random.default_rng(number).integers(0, 256, (_PIXELS, _PIXELS, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
