"""A model that calls a tool: its answer is a script that the last token of the prompt selects.

Command lines of coding agents need a model that calls one of their tools and then ends. This one does, with
a real vLLM engine and its tool parser: each token of a script is an added token that occurs once, and by the
weights each has one successor. Attention adds nothing. The chat template ends the prompt with the first token
of a script: the call of a tool that the request offers, or the last answer once a tool has replied. Of the
conversation only the end of the last message is in the prompt, so that instructions do not fill it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tailrace.tiny import MODEL_PATH

# The tools that the agents offer, with arguments that each accepts. The first one that is offered is called.
TOOL_CALLS: Final[Mapping[str, Mapping[str, object]]] = {
    "Bash": {"command": "echo ran", "description": "Say ran"},
    "bash": {"command": "echo ran", "description": "Say ran"},
    "exec_command": {"cmd": "echo ran"},
    "shell_command": {"command": "echo ran"},
    "shell": {"command": ["echo", "ran"]},
}
_STEPS: Final = 250
_PIECE: Final = 9
_HIDDEN: Final = 256
_CONTEXT: Final = 60_000
_SEED: Final = 20261128
_TEMPLATE: Final = """
{%- set script = namespace(name='end') %}
{%- if messages | selectattr('role', 'equalto', 'tool') | list | length == 0 %}
    {%- for tool in tools or [] %}
        {%- set name = tool.function.name if tool.function is defined else tool.name %}
        {%- if name in NAMES and script.name == 'end' %}{% set script.name = name %}{% endif %}
    {%- endfor %}
{%- endif %}
{%- set last = messages[-1].content %}
{{- '<|im_start|>' + (last | string)[-200:] + '<|im_end|>' }}
{%- if add_generation_prompt %}{{- '<|script ' + script.name + '|>' }}{% endif %}
"""


def _scripts() -> dict[str, str]:
    """Return the texts by name."""
    scripts = {
        name: f"\n<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for name, arguments in TOOL_CALLS.items()
    }
    return {**scripts, "end": "The tool ran."}


def make_pieces() -> dict[str, list[str]]:
    """Return the pieces of each script, of which no two are equal."""
    used: set[str] = set()
    pieces: dict[str, list[str]] = {}
    for name, text in _scripts().items():
        # Numbered steps make the answer long enough to be moved.
        pieces[name] = [f"{name} {step:03d}. " for step in range(_STEPS)]
        while text:
            length = _PIECE
            while text[:length] in used and length < len(text):
                length += 1
            pieces[name].append(text[:length])
            used.add(text[:length])
            text = text[length:]
    return pieces


def make_scripted_model(folder: Path) -> Path:
    """Write the model to the folder and return it; every process makes the same one."""
    import torch
    from tokenizers import AddedToken
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL_PATH)
    end = tokenizer.eos_token_id
    successors: dict[int, int] = {}
    for name, pieces in make_pieces().items():
        start = f"<|script {name}|>"
        tokenizer.add_tokens([AddedToken(start, special=True, normalized=False)], special_tokens=True)
        tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
        ids = [tokenizer.convert_tokens_to_ids(each) for each in (start, *pieces)]
        successors |= dict(pairwise([*ids, end]))
    tokenizer.chat_template = _TEMPLATE.replace("NAMES", str(list(TOOL_CALLS)))
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        intermediate_size=_HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(_SEED)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        vectors = torch.randn(len(tokenizer), _HIDDEN)
        model.model.embed_tokens.weight.copy_(vectors)
        # What follows no token of a script is never sampled; what follows one is, at every temperature.
        model.lm_head.weight.zero_()
        for token, successor in successors.items():
            model.lm_head.weight[successor] += vectors[token]
    model.save_pretrained(folder)
    shutil.copy(MODEL_PATH / "generation_config.json", folder)
    return folder
