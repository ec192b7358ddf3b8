"""Python's cyclic garbage collector, kept from looking through a simulation again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collections within.

    What a simulation drops is freed by reference counts, and what it keeps are millions of small objects that
    the collector would visit every time: a seventh of the time of an hour's trace, for nothing found.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
