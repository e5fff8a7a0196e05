"""From a ClusterConfig to vLLM's own engine arguments. `engine.args` and a pool's `engine_args` pass through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.messages import Role

# Set by pdserve; a user's own value for one of these would break the split in a way that shows up late.
RESERVED = (
    "kv_transfer_config",
    "kv_events_config",
    "worker_extension_cls",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "model",
    "tokenizer",
    "revision",
    "max_model_len",
    "dtype",
)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one replica's engine needs beyond the configuration.

    Attributes:
        model_path: a folder or a Hugging Face id, already resolved.
        kv_transfer: vLLM's KVTransferConfig as a mapping, None for a colocated pool.
        kv_events: vLLM's KVEventsConfig as a mapping, None where events are off.
        environment: variables that must be set before vLLM is imported.
        kv_cache_bytes: size of the KV cache of one rank; None = vLLM measures what is free.
        eager: do not compile the model.
        ports: the reservation, kept for the life of the engine.
        executor: how vLLM starts its ranks; None leaves it to vLLM, which guesses from Ray's presence.
    """

    model_path: str
    kv_transfer: dict[str, Any] | None = None
    kv_events: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    ports: Any = None
    kv_cache_bytes: int | None = None
    eager: bool = False
    executor: str | None = None


def engine_arguments(config: ClusterConfig, role: Role, settings: EngineSettings) -> Any:
    """vLLM's AsyncEngineArgs of one replica of a pool.

    Raises:
        ConfigError: an argument that pdserve sets itself, or that this vLLM does not know.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    pool = config.pool(role)
    extra = {**config.engine.args, **pool.engine_args}
    for name in extra:
        path = f"pools.{role}.engine_args.{name}" if name in pool.engine_args else f"engine.args.{name}"
        if name in RESERVED:
            raise ConfigError(path, "is set by pdserve", "use model:, pools.*.layout or kv_transfer: instead")
        if name not in AsyncEngineArgs.__dataclass_fields__:
            raise ConfigError(path, "this vLLM has no such engine argument", "see vLLM's engine arguments")
    arguments: dict[str, Any] = {
        **shared_arguments(config, settings.model_path),
        "tensor_parallel_size": pool.layout.tp,
        "pipeline_parallel_size": pool.layout.pp,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "worker_extension_cls": "cluster.engine.vllm.worker_extension.LeaseExtension",
        **extra,
    }
    if settings.eager:
        arguments.setdefault("enforce_eager", True)
    if settings.kv_cache_bytes is not None:
        arguments.setdefault("kv_cache_memory_bytes", settings.kv_cache_bytes)
    if settings.executor is not None:
        arguments.setdefault("distributed_executor_backend", settings.executor)
    if pool.layout.dp > 1:
        arguments["data_parallel_size"] = pool.layout.dp
    if settings.kv_transfer is not None:
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(**settings.kv_transfer)
    if settings.kv_events is not None:
        from vllm.config.kv_events import KVEventsConfig

        arguments["kv_events_config"] = KVEventsConfig(**settings.kv_events)
    return AsyncEngineArgs(**arguments)


def shared_arguments(config: ClusterConfig, model_path: str) -> dict[str, Any]:
    """What engines and the router's OpenAI layer must agree on."""
    arguments: dict[str, Any] = {
        "model": model_path,
        "revision": config.model.revision,
        "dtype": config.model.dtype,
        "served_model_name": served_name(config),
        "enable_log_requests": False,
    }
    if config.model.max_model_len is not None:
        arguments["max_model_len"] = config.model.max_model_len
    return arguments


def served_name(config: ClusterConfig) -> str:
    """The name that clients use."""
    return config.model.served_name or config.model.id
