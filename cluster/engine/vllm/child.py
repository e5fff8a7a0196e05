"""A vLLM plugin that ties engine processes to the life of the replica that started them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM in every engine process: when the parent dies, however it dies, so does this process.

    An orphaned engine would keep its accelerator memory and its side-channel port, and its replacement could not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None or os.name != "posix":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent.pid:
        os.kill(os.getpid(), signal.SIGKILL)
