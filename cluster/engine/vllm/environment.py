"""What must be in place before vLLM is imported in a replica: ports, environment, the model's folder."""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.engine.vllm.arguments import EngineSettings
from cluster.layout import replica_layout
from cluster.messages import Role
from cluster.models.resolve import resolve
from kv_transfer.kv_events_plugin import BIND_KV_EVENTS
from kv_transfer.ports import PortReservation, reserve
from kv_transfer.settings import PortPlan, engine_transfer, ports_needed


def prepare(config: ClusterConfig, role: Role, *, host: str) -> EngineSettings:
    """Reserve this replica's ports and gather what its engine is started with.

    Raises:
        UserError: the model is not there, or no ports are free.
    """
    model = resolve(config.model)
    on_cpu = runs_on_cpu(config)
    layout = config.pool(role).layout
    reservation = reserve(ports_needed(layout), lowest=config.kv_transfer.port_min, highest=config.kv_transfer.port_max)
    ports = PortPlan(reservation.first, layout.dp)
    transfer = engine_transfer(config, role, host=host, ports=ports, on_cpu=on_cpu)
    environment = {"VLLM_NO_USAGE_STATS": "1", BIND_KV_EVENTS: "1", **base_environment(config, model.is_folder)}
    environment |= transfer.environment
    if on_cpu:
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.engine.cpu.threads),
        }
    eager = on_cpu and not config.engine.cpu.compile
    kv_bytes = int(config.engine.cpu.kvcache_gib * 2**30) if on_cpu else None
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{host}:{ports.kv_events}",
        "replay_endpoint": f"tcp://{host}:{ports.kv_replay}",
        "buffer_steps": 10_000,
    }
    executor = replica_layout(config, role, on_cpu=on_cpu).executor
    return EngineSettings(
        model_path=model.path,
        kv_transfer=transfer.kv_transfer_config,
        kv_events=events,
        environment=environment,
        ports=reservation,
        kv_cache_bytes=kv_bytes,
        executor=executor,
        eager=eager,
    )


def base_environment(config: ClusterConfig, local_model: bool) -> dict[str, str]:
    """For every process that imports vLLM, the router too."""
    environment: dict[str, str] = {"VLLM_LOGGING_LEVEL": config.engine.log_level}
    if local_model:
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def runs_on_cpu(config: ClusterConfig) -> bool:
    """Whether engines compute on CPU; `auto` asks which build of vLLM is installed."""
    if config.engine.device != "auto":
        return config.engine.device == "cpu"
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


__all__ = ["PortReservation", "base_environment", "prepare", "runs_on_cpu"]
