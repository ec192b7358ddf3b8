"""The clients with their versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.clients import agents, tools
from tests.clients.client import Client, program

CLIENTS: Final[Mapping[str, Client]] = {
    client.name: client
    for client in (
        Client("openai", "openai==3.57.0", program("openai_client.py")),
        Client("anthropic", "anthropic==2.14.0", program("anthropic_client.py")),
        Client("litellm", "litellm==1.110.2", program("litellm_client.py")),
        # Of the environment that the tests run in.
        Client("vllm-bench", "vllm==0.32.0", tools.run_vllm_bench, "here"),
        Client(
            "schemathesis",
            "schemathesis==4.32.5",
            tools.run_schemathesis,
            known=("POST /is_scaling_elastic_ep", "POST /scale_elastic_ep"),
        ),
        # Without transformers, it reads no tokenizer.
        Client("lm-eval", "lm-eval[api]==0.4.13", tools.run_lm_eval, beside=("transformers==5.19.0",)),
        # Any other torch is several gigabytes larger.
        Client("guidellm", "guidellm==0.8.1", tools.run_guidellm, beside=("torch==2.13.0",)),
        Client("aiperf", "aiperf==0.13.0", tools.run_aiperf),
        Client("codex", "@openai/codex@0.171.0", agents.run_codex, "npm", "scripted"),
        Client("claude-code", "@anthropic-ai/claude-code@2.1.332", agents.run_claude_code, "npm", "scripted"),
        Client("opencode", "opencode-ai@1.18.33", agents.run_opencode, "npm", "scripted"),
    )
}
