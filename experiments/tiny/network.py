"""The Qwen3 forward pass, for training only; serving uses vLLM's own.

``transformers`` has this architecture too, but reads position ids that jump as several sequences packed into
one row and masks them from each other, and jumping positions are how this model is trained. Parameters carry
the names of a published Qwen3 checkpoint, so that saving the state is all there is to exporting.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.tiny.tokens import END_OF_TEXT, IM_END, VOCABULARY_SIZE


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that make a Qwen3 model this small."""

    layers: int = 3
    hidden: int = 96
    intermediate: int = 192
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_positions: int = 8192

    def as_config(self) -> dict[str, object]:
        """Return the content of ``config.json``."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": IM_END,
            "pad_token_id": END_OF_TEXT,
            "dtype": "float32",
        }


class RMSNorm(nn.Module):  # type: ignore[misc]
    """Root-mean-square norm with a learned gain."""

    def __init__(self, size: int, eps: float, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), gain))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):  # type: ignore[misc]
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        # Normed queries and keys bound the attention scores. Picking one token out of thousands wants scores
        # well above those that a gain of one allows, so training starts part of the way there.
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, gain=1.5)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, gain=1.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def split(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.head_dim)

        q = _rotate(self.q_norm(split(self.q_proj(x))).transpose(1, 2), cos, sin)
        k = _rotate(self.k_norm(split(self.k_proj(x))).transpose(1, 2), cos, sin)
        v = split(self.v_proj(x)).transpose(1, 2)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):  # type: ignore[misc]
    """Gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):  # type: ignore[misc]
    """One transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):  # type: ignore[misc]
    """Embedding, layers and last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY_SIZE, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)


class Network(nn.Module):  # type: ignore[misc]
    """The whole model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden, VOCABULARY_SIZE, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.5)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return the logits of the rows of ``ids`` (batch, length) where ``mask`` is set, as one list."""
        half = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float32) / self.shape.head_dim
        angles = positions[:, None, :, None].float() * self.shape.rope_theta**-half
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.model.norm(x[mask]))
        return logits


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding, the first half of each head paired with the second."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
