"""What a running vLLM engine says about itself."""

from __future__ import annotations

from typing import Any

from cluster.config import ClusterConfig
from cluster.engine.vllm.arguments import EngineSettings
from cluster.messages import Role, WorkerInfo
from cluster.models.digest import weights_digest
from kv_transfer.compatibility import cache_scales, rope_of


def worker_info(
    config: ClusterConfig,
    role: Role,
    settings: EngineSettings,
    vllm_config: Any,
    worker_id: str,
    incarnation: str,
    node: str,
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
        max_num_seqs=scheduler.max_num_seqs * pool.layout.dp,  # vLLM's is a rank's
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        accelerators=parallel.world_size * pool.layout.dp,
        accelerator_type=pool.accelerator,
        node=node,
        kv_events_endpoint=events.get("endpoint"),
        kv_replay_endpoint=events.get("replay_endpoint"),
        fingerprint=fingerprint(vllm_config),
    )


def kv_bytes_per_token(vllm_config: Any) -> int:
    """Bytes of KV per token over all ranks: 2 x layers x KV heads held x head size x bytes of an element.

    A rank cannot hold half a KV head, so beyond `kv_heads` ranks each holds a whole copy of one. A latent cache holds
    one vector per token and layer (vLLM's head size), whole on every rank.
    """
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    dtype = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    item = dtype.itemsize if hasattr(dtype, "itemsize") else (1 if "fp8" in str(dtype) else 2)
    tp = parallel.tensor_parallel_size
    vectors = tp if model.use_mla else 2 * max(model.get_total_num_kv_heads(), tp)
    return int(model.hf_text_config.num_hidden_layers * vectors * model.get_head_size() * item)


def fingerprint(vllm_config: Any) -> dict[str, Any]:
    """What must agree before two engines may exchange KV (see kv_transfer/compatibility.py)."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    hf, text = model.hf_config.to_dict(), model.hf_text_config.to_dict()
    args = {"quantization": model.quantization, "kv_cache_dtype_skip_layers": cache.kv_cache_dtype_skip_layers}
    speculative = vllm_config.speculative_config
    backend = vllm_config.attention_config.backend
    return {
        "model": model.model,
        "revision": model.revision,
        "weights": weights_digest(model.model, model.revision),
        "layers": text["num_hidden_layers"],
        "kv_heads": model.get_total_num_kv_heads(),
        "head_dim": model.get_head_size(),
        "latent": bool(model.use_mla),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": str(cache.cache_dtype),
        "cache_scales": cache_scales(hf, str(cache.cache_dtype), args),
        "block_size": cache.block_size,
        "attention_backend": getattr(backend, "name", backend),
        "max_model_len": model.max_model_len,
        "rope": rope_of(text),
        "sliding_window": model.get_sliding_window(),
        "speculative": None if speculative is None else f"{speculative.method} {speculative.model}",
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "connector": "nixl",
        "connector_version": NIXL_CONNECTOR_VERSION,
        "engine_version": vllm.__version__,
    }
