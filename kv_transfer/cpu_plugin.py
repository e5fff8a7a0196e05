"""A vLLM plugin for engines that share few CPU cores. Off unless asked for, part by part.

vLLM loads it (entry point group `vllm.general_plugins`) in every process of an engine: front end, engine core,
workers; under Ray too. Each part is on where its environment variable is `1`. The engine adapter sets them
from `engine.cpu` of the ClusterConfig (see `environment` in kv_transfer/settings.py).

| variable | without it | with it |
|---|---|---|
| PDSERVE_CPU_RELAX_UCX_POLLING | NIXL's progress thread polls UCX without a pause: a core per engine | 100 us pause |
| PDSERVE_CPU_FREE_MAIN_THREAD | NIXL pins every engine's main thread to the last core of its NUMA node | not pinned |
| PDSERVE_BIND_KV_EVENTS | see kv_transfer/kv_events_plugin.py; on for every engine, on GPUs too | |
| PDSERVE_CPU_SLEEP_IN_QUEUE | the queue to the worker spins on sched_yield for a second after each read | 50 us sleep |

A part that does not find what it changes, because vLLM or NIXL moved it, logs one line and changes nothing.
This is the only module of `kv_transfer` that knows vLLM; it is imported inside the functions.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from kv_transfer.kv_events_plugin import BIND_KV_EVENTS, bind_kv_events

RELAX_UCX_POLLING = "PDSERVE_CPU_RELAX_UCX_POLLING"
FREE_MAIN_THREAD = "PDSERVE_CPU_FREE_MAIN_THREAD"
SLEEP_IN_QUEUE = "PDSERVE_CPU_SLEEP_IN_QUEUE"

UCX_POLL_PAUSE_US = 100
QUEUE_SLEEP_S = 50e-6

# vLLM configures loggers below its own name only.
_log = logging.getLogger("vllm.plugins.pdserve_cpu")
_MARK = "_pdserve_cpu"


class TargetMissing(Exception):
    """What a part changes is not where it was."""


def register() -> None:
    """Entry point. Applies the parts that are switched on; calling it again changes nothing."""
    for variable, part in PARTS.items():
        if os.environ.get(variable) != "1":
            continue
        try:
            part()
        except (ImportError, AttributeError, TypeError, TargetMissing) as e:
            _log.warning("%s has no effect with this vLLM: %s", variable, e)


def relax_ucx_polling() -> None:
    """Give NIXL agents a progress thread that pauses between polls.

    NIXL's Python API sets `pthrDelay = 0`. It is imported late on purpose (vLLM sets up UCX first), so this waits
    for vLLM's own import of it.
    """
    from vllm.distributed import nixl_utils

    load = nixl_utils._load_nixl_attr
    if hasattr(load, _MARK):
        return

    @functools.wraps(load)
    def load_and_relax(name: str) -> Any:
        value = load(name)
        if name == "NixlWrapper" and value is not None:
            try:
                _relax_agents_of(value)
            except (ImportError, AttributeError, TypeError, TargetMissing) as e:
                _log.warning("%s has no effect with this NIXL: %s", RELAX_UCX_POLLING, e)
        return value

    setattr(load_and_relax, _MARK, True)
    nixl_utils._load_nixl_attr = load_and_relax


def _relax_agents_of(agent_class: type) -> None:
    """Replace the config class that `agent_class` instantiates by one whose pause is never zero."""
    bindings = agent_class.__init__.__globals__.get("nixlBind")  # type: ignore[misc]
    config_class = getattr(bindings, "nixlAgentConfig", None)
    delay = getattr(config_class, "pthrDelay", None)
    if bindings is None or config_class is None or delay is None:
        raise TargetMissing("nixlAgentConfig.pthrDelay is not there")
    if not hasattr(config_class, _MARK):
        bindings.nixlAgentConfig = relaxed_config_class(config_class)


def relaxed_config_class(config_class: Any) -> Any:
    """A subclass whose `pthrDelay` (microseconds) turns 0 into UCX_POLL_PAUSE_US."""
    inherited = config_class.pthrDelay

    def read(self: Any) -> int:
        return int(inherited.__get__(self, type(self)))

    def write(self: Any, value: int) -> None:
        inherited.__set__(self, value or UCX_POLL_PAUSE_US)

    return type(config_class)(config_class.__name__, (config_class,), {"pthrDelay": property(read, write), _MARK: True})


def free_main_thread() -> None:
    """Leave engine threads where `VLLM_CPU_OMP_THREADS_BIND` (or nothing) put them.

    On CPU the NIXL connector pins the main thread of every worker to the last core of each NUMA node that
    `discover_numa_topology` reports. Several engines on one node then share one core. No node, no pin.
    """
    from vllm.platforms.cpu import CpuPlatform

    if not callable(getattr(CpuPlatform, "discover_numa_topology", None)):
        raise TargetMissing("CpuPlatform.discover_numa_topology is not there")
    CpuPlatform.discover_numa_topology = classmethod(_no_numa_nodes)  # type: ignore[method-assign, assignment]


def _no_numa_nodes(cls: type) -> list[list[int]]:
    del cls
    return []


def sleep_in_queue() -> None:
    """Wait for the queue between engine core and worker without keeping a core busy.

    On a machine with fewer cores than spinning threads, the writer waits for a reader that only yields, and tokens
    reach the client in bursts.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    module: Any = shm_broadcast
    if not callable(getattr(module, "sched_yield", None)):
        raise TargetMissing("shm_broadcast.sched_yield is not there")
    module.sched_yield = _short_sleep


def _short_sleep() -> None:
    time.sleep(QUEUE_SLEEP_S)


PARTS: dict[str, Callable[[], None]] = {
    RELAX_UCX_POLLING: relax_ucx_polling,
    FREE_MAIN_THREAD: free_main_thread,
    SLEEP_IN_QUEUE: sleep_in_queue,
    BIND_KV_EVENTS: bind_kv_events,
}
