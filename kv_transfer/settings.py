"""From a ClusterConfig to what one engine needs for KV transfer: connector settings, environment, ports.

Pure: the engine adapter reserves the ports (kv_transfer/ports.py) and knows its host; both are arguments.

Ports. vLLM's NIXL connector listens once per engine, on `VLLM_NIXL_SIDE_CHANNEL_PORT` plus the attention-DP rank;
all TP and PP ranks of that engine answer through this one listener. KV events publish and replay on one port each,
also plus the DP rank. `ports_needed(layout)` counts them, `PortPlan` names them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cluster.config import ClusterConfig, CpuConfig, LayoutConfig
from cluster.messages import Role
from kv_transfer.cpu_plugin import FREE_MAIN_THREAD, RELAX_UCX_POLLING, SLEEP_IN_QUEUE

CONNECTORS = {"nixl": "NixlConnector"}
ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}

PORTS_PER_DP_RANK = 3

# The prefill leg's request for a ticket: keep the KV, somebody will pull it.
TICKET_REQUEST: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class PortPlan:
    """Ports of one replica with `dp` attention-DP ranks, from the first of a reservation of 3 x dp."""

    first: int
    dp: int = 1

    @property
    def side_channel(self) -> int:
        return self.first

    @property
    def kv_events(self) -> int:
        return self.first + self.dp

    @property
    def kv_replay(self) -> int:
        return self.first + 2 * self.dp


@dataclass(frozen=True, slots=True)
class EngineTransfer:
    """What the engine adapter hands to vLLM.

    Attributes:
        kv_transfer_config: arguments of vLLM's `KVTransferConfig`; None in a colocated cluster.
        environment: variables to set before the engine starts.
    """

    kv_transfer_config: dict[str, Any] | None
    environment: dict[str, str] = field(default_factory=dict)


def ports_needed(layout: LayoutConfig) -> int:
    return PORTS_PER_DP_RANK * layout.dp


def engine_transfer(config: ClusterConfig, role: Role, *, host: str, ports: PortPlan, on_cpu: bool) -> EngineTransfer:
    """Settings of one engine of a pool.

    Args:
        host: address of this node that engines of the other pool can reach.
        on_cpu: the engine computes on CPU; its KV then lies in host memory.
    """
    environment = cpu_environment(config.engine.cpu) if on_cpu else {}
    if config.colocated:
        return EngineTransfer(None, environment)
    settings: dict[str, Any] = {
        "kv_connector": CONNECTORS[config.kv_transfer.connector],
        "kv_role": ROLES[role],
        "kv_load_failure_policy": config.kv_transfer.on_failure,
        "kv_connector_extra_config": {
            # vLLM takes whole seconds and renews a lease every sixth of it.
            "kv_lease_duration": math.ceil(config.kv_transfer.lease_s),
            **config.kv_transfer.extra,
        },
    }
    if on_cpu:
        settings["kv_buffer_device"] = "cpu"
    environment |= {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side_channel),
    }
    return EngineTransfer(settings, environment)


def cpu_environment(cpu: CpuConfig) -> dict[str, str]:
    """Switches of kv_transfer/cpu_plugin.py that `engine.cpu` asks for."""
    wanted = {
        RELAX_UCX_POLLING: cpu.relax_ucx_polling,
        FREE_MAIN_THREAD: cpu.free_main_thread,
        SLEEP_IN_QUEUE: cpu.sleep_in_queue,
    }
    return {variable: "1" for variable, on in wanted.items() if on}
