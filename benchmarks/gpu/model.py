"""Write a model to load with dummy weights: only a configuration and a tokenizer, nothing downloaded."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a Llama model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token, in the data type of the weights."""
        width = 4 if self.dtype == "float32" else 2
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * width


# Llama 3.1 8B (its published config.json): 131,072 bytes of KV per token.
LLAMA_8B = ModelShape(4096, 14336, 32, 32, 8, 128, 128256, 131072, "bfloat16")
# For CPUs: 512 bytes of KV per token.
SMALL = ModelShape(128, 256, 2, 2, 1, 64, 512, 8192, "bfloat16")


def write_model(folder: Path, shape: ModelShape) -> Path:
    """Write a model's folder, without weights. A token is a word: `t17` is token 17; such words begin at
    3."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **asdict(shape),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    words = ["<unk>", "<s>", "</s>", *(f"t{number}" for number in range(3, shape.vocab_size))]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_position_embeddings,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def prompt(tokens: int, vocab_size: int, seed: int) -> str:
    """Return a text of exactly this many tokens, different for each seed."""
    return " ".join(f"t{n}" for n in prompt_ids(tokens, vocab_size, seed))


def prompt_ids(tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Return the token IDs of `prompt`."""
    rng = random.Random(seed)
    return [rng.randrange(16, vocab_size) for _ in range(tokens)]
