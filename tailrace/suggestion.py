"""Names that a user may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from tailrace.bounded import shown


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause in brackets with the known name that is most like this one; empty if none is."""
    close = get_close_matches(name[:100], list(known), n=1)
    return f" (did you mean {shown(close[0])}?)" if close else ""
