"""What a running vLLM engine says about itself."""

from __future__ import annotations

from typing import Any

from cluster.config import ClusterConfig
from cluster.engine.vllm.arguments import EngineSettings
from cluster.messages import Role, WorkerInfo


def worker_info(
    config: ClusterConfig, role: Role, settings: EngineSettings, vllm_config: Any, worker_id: str, incarnation: str, node: str
) -> WorkerInfo:
    """The engine's constants, read from the configuration that vLLM resolved."""
    pool = config.pool(role)
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    events = settings.kv_events or {}
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=incarnation,
        role=role,
        block_size_tokens=cache.block_size,
        kv_total_blocks=cache.num_gpu_blocks or 0,
        kv_bytes_per_token=kv_bytes_per_token(vllm_config),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        accelerators=parallel.world_size,
        accelerator_type=pool.accelerator,
        node=node,
        kv_events_endpoint=events.get("endpoint"),
        kv_replay_endpoint=events.get("replay_endpoint"),
        fingerprint=fingerprint(vllm_config),
    )


def kv_bytes_per_token(vllm_config: Any) -> int:
    """Bytes of KV per token over all ranks: 2 x layers x KV heads held x head size x bytes of an element.

    A rank cannot hold half a KV head, so beyond `kv_heads` ranks each holds a whole copy of one.
    """
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    dtype = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    item = dtype.itemsize if hasattr(dtype, "itemsize") else (1 if "fp8" in str(dtype) else 2)
    heads = max(model.get_total_num_kv_heads(), parallel.tensor_parallel_size)
    return int(2 * model.hf_text_config.num_hidden_layers * heads * model.get_head_size() * item)


def fingerprint(vllm_config: Any) -> dict[str, Any]:
    """What must agree before two engines may exchange KV (see kv_transfer/compatibility.py)."""
    import vllm

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    text = model.hf_text_config
    return {
        "model": model.model,
        "revision": model.revision,
        "layers": text.num_hidden_layers,
        "kv_heads": model.get_total_num_kv_heads(),
        "head_dim": model.get_head_size(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "max_model_len": model.max_model_len,
        "rope": str(getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None)),
        "sliding_window": getattr(text, "sliding_window", None),
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "connector": "nixl",
        "engine_version": vllm.__version__,
    }
