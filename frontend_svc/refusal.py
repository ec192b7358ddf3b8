"""How `frontend_svc` tells the front half that a request found no instance."""

from typing import Final

# vLLM passes an output's stop_reason through untouched; on an error output nobody else sets one.
NO_INSTANCE: Final = "tailrace:no-instance"
