"""The tiny model's vocabulary: one token a byte, and five that mark turns and thoughts.

With bytes as tokens any text can be asked, token counts can be worked out by hand, and the embedding stays
small. The two thinking tags are ordinary added tokens, not special ones: a special token is dropped from the
text before vLLM's text-based reasoning parsers see it.
"""

from pathlib import Path
from typing import Final

END_OF_TEXT: Final = 256
IM_START: Final = 257
IM_END: Final = 258
THINK: Final = 259
END_THINK: Final = 260
VOCABULARY_SIZE: Final = 261

CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
    {%- set parts = namespace(text='') %}
    {%- if message.content is string %}
        {%- set parts.text = message.content %}
    {%- elif message.content %}
        {%- for part in message.content if part.text is defined %}
            {%- set parts.text = parts.text + part.text %}
        {%- endfor %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {#- A thought is not part of the conversation: the next turn starts without it. #}
        {%- set parts.text = parts.text.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + parts.text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""

Turn = tuple[str, str]
"""A role and what it said."""


def encode_turns(turns: list[Turn]) -> list[int]:
    """Return the prompt that the chat template makes of ``turns``, up to where the model starts to
    generate."""
    ids: list[int] = []
    for role, text in turns:
        ids += [IM_START, *role.encode(), 10, *text.encode(), IM_END, 10]
    return [*ids, IM_START, *b"assistant\n"]


def write_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and the chat template into ``folder``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: byte for byte, letter in enumerate(_printable_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(str(folder))


def _printable_bytes() -> str:
    """Return the character that byte-level tokenizers show for each byte value, in order.

    Bytes that are visible characters stand for themselves, and the others for the code points from 256 on;
    the decoder of the ``tokenizers`` library expects exactly this table.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return "".join(chr(byte if byte in visible else next(hidden)) for byte in range(256))
