"""Keeps every core busy at the lowest priority.

Cores that share execution units (two virtual CPUs of one physical core, say) slow each other down: measured here, a
prompt takes 30% longer while the other core works. Then a profile of one engine alone would describe no cluster. With
this running during both, the profile and the cluster meet the same machine; what has work to do goes first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

WORK = """
import contextlib, os
os.nice(40)
# Where the kernel shares by sessions first, a process's own niceness counts only inside its session.
with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
    group.write("19")
import numpy
a = numpy.ones((512, 512), dtype=numpy.float32)
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100):
        a @ a
"""


@contextmanager
def busy_cores() -> Iterator[None]:
    """One process a core; they end with the block, or with this process."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([sys.executable, "-c", WORK], env=environment, start_new_session=True)
        for _ in range(len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
