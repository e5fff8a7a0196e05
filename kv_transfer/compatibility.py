"""Whether a prefill engine and a decode engine can exchange KV. Pure, and asked twice.

Before any weight is loaded, from the configuration (`configured`, by `pdserve check` and `serve`); and when two running
engines meet, from the fingerprints they report (`WorkerInfo.fingerprint`). Each refusal is one line that names both
values. Two fingerprints are compared only if they come from the same source: both configured or both reported.

A pair that differs here would not fail loudly by itself. Different block sizes or cache types pass start-up and
health checks, and then answer with other prompts' KV.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cluster.config import ClusterConfig
from cluster.messages import Role
from cluster.perf.model_shape import from_config
from kv_transfer.heads import divides, replicated

TpPairs = Literal["tested", "connector"]

# Field -> why both engines must agree on it. In this order they are reported.
MUST_AGREE = {
    "model": "KV of one model means nothing to another",
    "revision": "KV of one revision means nothing to another",
    "weights": "the model's files differ",
    "layers": "every layer's KV is shipped",
    "kv_heads": "every KV head is shipped",
    "head_dim": "a KV head has this many values",
    "latent": "a latent cache has another shape",
    "dtype": "KV is computed in this type",
    "cache_dtype": "KV bytes are copied as they are",
    "cache_scales": "quantized KV means nothing without its scales",
    "block_size": "KV is shipped and indexed in blocks of one size",
    "attention_backend": "backends lay out KV differently",
    "rope": "positions are part of the keys",
    "sliding_window": "the window decides which KV exists",
    "max_model_len": "one pool would accept what the other refuses",
    "speculative": "a draft model's KV is shipped too",
    "connector": "both ends speak one protocol",
    "connector_version": "both ends speak one protocol",
    "engine_version": "the connector refuses other versions",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why a pair cannot transfer. `str()` is its line."""

    field: str
    prefill: Any
    decode: Any
    why: str

    def __str__(self) -> str:
        return f"{self.field}: prefill has {_show(self.prefill)}, decode has {_show(self.decode)}; {self.why}"


def check_pair(prefill: Mapping[str, Any], decode: Mapping[str, Any], *, tp_pairs: TpPairs = "tested") -> list[Refusal]:
    """Every reason why KV of `prefill` cannot be used by `decode`; empty where it can.

    A field that neither side reports is not compared; one that a single side reports is a difference.

    Args:
        tp_pairs: "tested" refuses TP pairs that no test of this project covers although the connector takes them.
    """
    refusals = [
        Refusal(name, prefill.get(name), decode.get(name), why)
        for name, why in MUST_AGREE.items()
        if prefill.get(name) != decode.get(name)
    ]
    if any(refusal.field == "cache_dtype" for refusal in refusals):
        # Other types have other scales: one reason is enough.
        refusals = [refusal for refusal in refusals if refusal.field != "cache_scales"]
    if "tp" in prefill and "tp" in decode and not any(r.field in ("kv_heads", "latent") for r in refusals):
        refusals += check_layouts(prefill, decode, tp_pairs=tp_pairs)
    return refusals


def check_layouts(prefill: Mapping[str, Any], decode: Mapping[str, Any], *, tp_pairs: TpPairs) -> list[Refusal]:
    """The part of `check_pair` that is about layouts (`tp`, `pp`, `kv_heads`, `latent`), which the planner asks too."""
    return list(_layouts(prefill, decode, tp_pairs))


def _layouts(prefill: Mapping[str, Any], decode: Mapping[str, Any], tp_pairs: TpPairs) -> Iterator[Refusal]:
    if prefill.get("pp", 1) != 1 or decode.get("pp", 1) != 1:
        yield Refusal(
            "pp",
            prefill.get("pp", 1),
            decode.get("pp", 1),
            "the NIXL connector pulls whole models; use pp 1 in a split",
        )
    p, d = int(prefill["tp"]), int(decode["tp"])
    if max(p, d) % min(p, d):
        yield Refusal("tp", p, d, "one must be a multiple of the other")
        return
    # Every rank holds the whole latent cache: any rank can be read.
    if p == d or prefill.get("latent") or "kv_heads" not in prefill:
        return
    total = int(prefill["kv_heads"])
    if not divides(total, p) or not divides(total, d):
        yield Refusal("tp", p, d, f"{total} KV heads divide over neither fewer nor more such ranks")
    elif p > d and replicated(total, p):
        yield Refusal("tp", p, d, f"the connector cannot gather from {p} ranks that hold copies of {total} KV heads; "
                      f"use at most tp {max(d, total)} for prefill")  # fmt: skip
    elif tp_pairs == "connector":
        return
    elif p > d:
        yield Refusal("tp", p, d, f"use at most the TP of decode for prefill{_OVERRIDE}")
    elif replicated(total, d):
        yield Refusal("tp", p, d, f"{total} KV heads would be copied on {d} decode ranks but not on {p} prefill ranks; "
                      f"use at most tp {total} for decode, or equal TP{_OVERRIDE}")  # fmt: skip


_OVERRIDE = " (kv_transfer.tp_pairs: connector allows it, untested)"


def configured(config: ClusterConfig, role: Role, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fingerprint of a pool's engines as the configuration asks for them.

    Args:
        hf_config: the model's `config.json`.
    """
    pool = config.pool(role)
    args = {**config.engine.args, **pool.engine_args}
    shape = from_config(hf_config, name=config.model.id)
    text = hf_config.get("text_config") or hf_config
    dtype = str(args.get("dtype", config.model.dtype))
    model_dtype = str(text.get("torch_dtype") or text.get("dtype") or "auto")
    cache_dtype = str(args.get("kv_cache_dtype", "auto"))
    attention = args.get("attention_config")
    backend = attention.get("backend") if isinstance(attention, Mapping) else None
    return {
        "model": args.get("model", config.model.id),
        "revision": args.get("revision", config.model.revision),
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "latent": shape.latent,
        "dtype": model_dtype if dtype == "auto" else dtype,
        "cache_dtype": cache_dtype,
        "cache_scales": cache_scales(hf_config, cache_dtype, args),
        "block_size": args.get("block_size"),
        "attention_backend": args.get("attention_backend", backend),
        "rope": rope_of(text),
        "sliding_window": None if args.get("disable_sliding_window") else text.get("sliding_window"),
        "max_model_len": args.get("max_model_len", config.model.max_model_len) or shape.max_context,
        "speculative": _canonical(args.get("speculative_config")),
        "connector": config.kv_transfer.connector,
        "tp": pool.layout.tp,
        "pp": pool.layout.pp,
    }


def rope_of(text: Mapping[str, Any]) -> str:
    """What decides positions, in one canonical text."""
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types")
    return _canonical({key: text[key] for key in keys if text.get(key) is not None}) or "none"


def cache_scales(hf_config: Mapping[str, Any], cache_dtype: str, args: Mapping[str, Any]) -> str:
    """Where the scales of a quantized cache come from; a cache of 16 or 32 bits has none.

    A checkpoint's own scales are loaded by some quantization methods and left at 1 by others.
    """
    if cache_dtype in ("auto", "float16", "bfloat16", "float32"):
        return "none"
    quantization = hf_config.get("quantization_config") or {}
    return str(
        _canonical(
            {
                "scheme": quantization.get("kv_cache_scheme"),
                "method": args.get("quantization") or quantization.get("quant_method"),
                "skipped_layers": args.get("kv_cache_dtype_skip_layers") or [],
            }
        )
    )


def _canonical(value: Any) -> str | None:
    return None if value is None else json.dumps(value, sort_keys=True, default=str)


def _show(value: Any) -> str:
    return "the default" if value is None else str(value)
