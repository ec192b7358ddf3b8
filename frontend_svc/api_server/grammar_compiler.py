"""vLLM's validation of structured output, and the compilation that a worker will do, for `grammar_child`."""

from __future__ import annotations

import os
from contextlib import suppress
from copy import copy
from errno import EAGAIN
from typing import Final

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key
from vllm.v1.structured_output.utils import choice_as_grammar

from frontend_svc.api_server.grammar_verdict import INVALID, Verdict

_FIELDS: Final = ("choice", "grammar", "_backend", "_backend_was_auto")
# vLLM tries guidance next, so that both are ready.
_WARM_UP: Final = {"type": "integer", "multipleOf": 2}


class GrammarCompiler:
    """Validates and compiles grammars as configured. Nothing here is bounded: see `grammar_child`."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._tokenizer = cached_tokenizer_from_config(config.model_config)
        self._backend = XgrammarBackend(
            config, tokenizer=self._tokenizer, vocab_size=config.model_config.get_vocab_size()
        )
        with suppress(VLLMValidationError):
            self.check(StructuredOutputsParams(json=_WARM_UP))

    def check(self, params: StructuredOutputsParams) -> Verdict:
        """Validate and compile. Raise MemoryError, OSError, or what vLLM raises at an invalid grammar."""
        # An engine compiles all grammars with the backend of the first that it got, which is this one mostly,
        # even where vLLM's validation chooses another. That one is not asked first: where memory is short in
        # it, vLLM tries another backend, too. The others have bounds of their own, or do all in validation.
        failure = self._compile(params)
        if failure and params.structural_tag is not None:
            # Where vLLM parses a request, it refuses such a tag, whatever another backend would say.
            return Verdict(INVALID, f"Invalid structural_tag specification: {failure}")
        checked = copy(params)
        SamplingParams(structured_outputs=checked)._validate_structured_outputs(
            self._config.model_config, self._config.structured_outputs_config, self._tokenizer
        )
        if failure and checked._backend == "xgrammar":
            return Verdict(INVALID, f"The grammar does not compile: {failure}")
        changes = {name: getattr(checked, name) for name in _FIELDS}
        return Verdict(
            changes={name: value for name, value in changes.items() if value != getattr(params, name)}
        )

    def _compile(self, params: StructuredOutputsParams) -> str:
        """Return why a grammar does not compile; empty if it does. Raise MemoryError or OSError."""
        try:
            kind, text = get_structured_output_key(params)
            if kind == StructuredOutputOptions.CHOICE:
                kind, text = StructuredOutputOptions.GRAMMAR, choice_as_grammar(params.choice)
            self._backend.compile_grammar(kind, text)
        # xgrammar and vLLM raise what they like.
        except Exception as error:
            if isinstance(error, MemoryError) or "bad_alloc" in str(error):
                raise MemoryError from error
            # Of a thread that does not start.
            if isinstance(error, OSError) or os.strerror(EAGAIN) in str(error):
                raise OSError from error
            return str(error) or type(error).__name__
        return ""
