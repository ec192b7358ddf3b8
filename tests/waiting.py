"""How long tests wait."""

from __future__ import annotations

from typing import Final

# For something that must happen. Only a test that hangs waits this long: on a busy or slow machine everything
# takes many times as long as usual, and that must fail no test.
WAIT_S: Final = 300.0
