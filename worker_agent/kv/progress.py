"""UCX's progress thread, and calls during which it must not run.

With a running progress thread, ucxx passes some calls to it and waits on a condition variable in its own
stack frame. The thread sets a flag, releases the mutex and only then notifies (`CallbackNotifier::set` in
ucxx 0.52). If the caller sees the flag before that, its frame is gone when the thread notifies, and glibc
then changes what lies there: frames of whatever the caller calls next, which crashes. Without a progress
thread, ucxx makes these calls itself. Stopping the thread is safe: ucxx waits until it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import ucxx

# Longest sleep of the progress thread; events wake it up earlier. ucxx's default of a millisecond costs each
# idle worker 3% of a core.
_PROGRESS_MS: Final = 50


@contextmanager
def progress_paused() -> Iterator[None]:
    """Stop the progress thread for the block, which must be short and must not await.

    For creating and closing endpoints, and for looking for messages. UCX must be initialized.
    """
    worker = ucxx.core._get_ctx().worker
    worker.stop_progress_thread()
    try:
        yield
    finally:
        worker.start_progress_thread(polling_mode=False, epoll_timeout=_PROGRESS_MS)
