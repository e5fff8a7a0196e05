"""Another engine's work on the same host, for measurements: cores that share caches, memory bandwidth or execution
units (two virtual CPUs of one physical core) slow each other down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Matrix products of single precision: what prompts are computed with.
WORK = """
import os
import numpy
a = numpy.ones((512, 512), dtype=numpy.float32)
parent = os.getppid()
print("computing", flush=True)
while os.getppid() == parent:
    for _ in range(100):
        a @ a
"""


@contextmanager
def neighbour() -> Iterator[None]:
    """One thread that computes as long as the block runs; it ends with this process at the latest."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", WORK], env=environment, stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None
            worker.stdout.readline()
            yield
        finally:
            worker.kill()
