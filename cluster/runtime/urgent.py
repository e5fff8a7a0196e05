"""A process that measures must not wait for what it measures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def urgent() -> Iterator[bool]:
    """The calling thread comes before all ordinary ones of this machine, as far as the system allows (Linux; root or
    CAP_SYS_NICE, or a limit of real-time priorities above 0); yields whether it does.

    Linux may share cores between login sessions before it shares them between processes: beside two engines that kept
    two cores busy, a client in a session of its own waited up to 0.8 s for a core, and stamped its tokens then.
    Processes and threads begun meanwhile are ordinary ones.
    """
    granted = True
    try:
        policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except (OSError, AttributeError):
        granted = False
    try:
        yield granted
    finally:
        if granted:
            try:
                os.sched_setscheduler(0, policy, param)
            except OSError:
                # Whoever has the limit alone may not take the mark off again; it harms nobody.
                with suppress(OSError):
                    os.sched_setscheduler(0, policy | os.SCHED_RESET_ON_FORK, param)
