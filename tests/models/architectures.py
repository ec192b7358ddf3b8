"""Random models of a few megabytes, one for each way in which vLLM stores a request's state.

Sizes are the smallest that vLLM's CPU kernels support: heads of 64, for MLA a latent of 512 and 64 rotary
dimensions. Weights are drawn from a seed, so that every process creates the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

Setting = int | float | str | bool | list[str] | None

VOCABULARY: Final = 512
_SEED: Final = 20261122

_COMMON: Final[dict[str, Setting]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ATTENTION: Final[dict[str, Setting]] = {
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_EXPERTS: Final[dict[str, Setting]] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """`config`: class in `transformers`; `state`: what the state of a request consists of.

    prefix_caching: False for recurrent state, which vLLM's CPU kernels do not keep at block boundaries.
    """

    config: str
    state: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    dtype: str = "float32"
    prefix_caching: bool = True
    # vLLM's attention backend; empty: the one that it chooses.
    attention: str = ""


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture("LlamaConfig", "full attention", _ATTENTION),
    "qwen3moe": Architecture("Qwen3MoeConfig", "full attention", _ATTENTION | _EXPERTS),
    "deepseekv2": Architecture(
        "DeepseekV2Config",
        "latent attention (MLA)",
        {
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
        },
        # On a CPU with AMX, vLLM chooses one that takes bfloat16 alone.
        attention="CPU_MLA",
    ),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        "sliding windows, one full layer in six",
        _ATTENTION | {"num_hidden_layers": 6, "sliding_window": 64},
    ),
    "gptoss": Architecture(
        "GptOssConfig",
        "alternating sliding window and full attention",
        _ATTENTION
        | {
            "intermediate_size": 64,
            "sliding_window": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "mamba2": Architecture(
        "Mamba2Config",
        "recurrent state",
        {"state_size": 16, "num_heads": 8, "head_dim": 64, "n_groups": 1, "expand": 2},
        prefix_caching=False,
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridConfig",
        "alternating recurrent state and full attention",
        {
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "num_local_experts": 0,
            "shared_intermediate_size": 128,
        },
        prefix_caching=False,
    ),
    "qwen3next": Architecture(
        "Qwen3NextConfig",
        "gated delta nets, one full layer in four",
        _ATTENTION
        | _EXPERTS
        | {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "shared_expert_intermediate_size": 32,
        },
        # vLLM's gated delta nets on CPU support no other type.
        dtype="bfloat16",
        prefix_caching=False,
    ),
}


def write_model(name: str, folder: Path) -> Path:
    """Write the model unless it exists; return its folder. Takes seconds, for `transformers`."""
    path = folder / name
    if (path / "model.safetensors").exists():
        return path
    import torch
    import transformers

    found = ARCHITECTURES[name]
    torch.manual_seed(_SEED)
    settings = {
        key: value
        for key, value in {**_COMMON, **found.settings}.items()
        if not (name == "mamba2" and key == "max_position_embeddings")
    }
    config = getattr(transformers, found.config)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    return path
