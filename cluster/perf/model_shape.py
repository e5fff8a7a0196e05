"""What a model costs: parameters, weight bytes and KV bytes, from a Hugging Face `config.json`.

Only sizes are read, no code of a model. Formulas: a grouped-query cache holds
2 * kv_heads * head_dim values a token and layer (Ainslie et al., GQA, 2023); a latent cache holds one vector of
kv_lora_rank + qk_rope_head_dim values a token and layer, whole on every rank (DeepSeek-V2, 2024, section 2.1).
Parameter counts follow the layers' matrices; for the shapes in the package they equal the published counts.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.perf.quantization import quantized_dtype

DTYPE_BYTES: dict[str, float] = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5 + 2.0 / 128,  # one 16-bit scale a group of 128
    "fp4": 0.5 + 1.0 / 16,  # one 8-bit scale a block of 16
    "mxfp4": 0.5 + 1.0 / 32,
}
# Configs whose layers differ in ways that are not sized here; a wrong sum would be worse than none.
_UNKNOWN_STRUCTURES = (
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "interleave_moe_layer_step",
    "compress_ratios",
    "mamba_num_heads",
    "block_configs",
)


# What the config classes of transformers 5.19 add where a file says nothing: that every n-th layer attends to all
# tokens, and which types' output matrix is the embedding.
_WINDOW_PATTERNS = {
    "gemma2": 2,
    "vaultgemma": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "olmo3": 4,
    "gemma3n_text": 5,
    "gemma3": 6,
    "gemma3_text": 6,
}
_TIED = ("gemma", "vaultgemma", "cohere", "smollm3", "starcoder2")


def dtype_bytes(dtype: str) -> float:
    """Bytes a value, scales included."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise UserError(
            f"dtype: {dtype!r} has no known size; name one of {', '.join(DTYPE_BYTES)} "
            "(--weights and --kv, or weight_dtype and kv_dtype)"
        ) from None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one decoder-only model.

    Attributes:
        layers: all decoder layers; `sliding_layers` of them attend to `window_tokens` only and `linear_layers`
            keep a state of `state_values` values a sequence instead of a cache.
        intermediate: width of a dense MLP.
        experts, experts_per_token, expert_intermediate: 0 in a dense model; `dense_layers` of a mixture are dense.
        shared_intermediate: summed width of the always-active experts.
        kv_lora_rank, rope_head_dim: of a latent cache (MLA), else 0; `v_head_dim` differs from `head_dim` only there.
        dtype: of the published weights; how they are quantized, in words, where `dtype_bytes` knows no size of it.
        nominal_params: overrides the count from the matrices (a model known only as "70B").
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context: int
    dtype: str = "bfloat16"
    tied_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    mlp_matrices: int = 3
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    sliding_layers: int = 0
    window_tokens: int = 0
    linear_layers: int = 0
    state_values: int = 0
    nominal_params: int | None = None

    @property
    def latent(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def attention_layers(self) -> int:
        """Layers that keep a cache which grows with the context (up to the window)."""
        return self.layers - self.linear_layers

    # -- parameters ---------------------------------------------------------------------------------------------

    @property
    def attention_params(self) -> int:
        """One layer's attention matrices (and biases)."""
        if self.latent:
            qk_dim = self.head_dim + self.rope_head_dim
            q_out = self.heads * qk_dim
            q = (
                self.hidden * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * q_out
                if self.q_lora_rank
                else self.hidden * q_out
            )
            kv_down = self.hidden * (self.kv_lora_rank + self.rope_head_dim) + self.kv_lora_rank
            kv_up = self.kv_lora_rank * self.heads * (self.head_dim + self.v_head_dim)
            return q + kv_down + kv_up + self.heads * self.v_head_dim * self.hidden
        q_out, kv_out = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden * (q_out + 2 * kv_out) + q_out * self.hidden
        bias = q_out + 2 * kv_out if self.attention_bias else 0
        return matrices + bias + (2 * self.head_dim if self.qk_norm else 0)

    def mlp_params(self, *, active: bool) -> float:
        """One layer's MLP, averaged over the layers; the parts one token passes where `active`."""
        return self.common_mlp_params + (self.experts_per_token if active else self.experts) * self.expert_params

    @property
    def common_mlp_params(self) -> float:
        """What every token passes of one layer's MLP, averaged over the layers: dense ones, shared experts, routers."""
        dense = self.mlp_matrices * self.hidden * self.intermediate
        if not self.experts:
            return dense
        sparse = self.mlp_matrices * self.hidden * self.shared_intermediate + self.hidden * self.experts
        share = self.dense_layers / self.layers
        return share * dense + (1 - share) * sparse

    @property
    def expert_params(self) -> float:
        """One routed expert of one layer, averaged over the layers."""
        return (1 - self.dense_layers / self.layers) * self.mlp_matrices * self.hidden * self.expert_intermediate

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All parameters."""
        if self.nominal_params is not None:
            return self.nominal_params
        body = self.layers * (self.attention_params + self.mlp_params(active=False) + 2 * self.hidden)
        return round(body) + self.embedding_params * (1 if self.tied_embeddings else 2) + self.hidden

    @property
    def active_params(self) -> int:
        """Parameters one token is multiplied with: one pass reads them for a batch of one."""
        if not self.experts:
            return self.params - (0 if self.tied_embeddings else self.embedding_params)
        body = self.layers * (self.attention_params + self.mlp_params(active=True) + 2 * self.hidden)
        return round(body) + self.embedding_params + self.hidden

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Bytes of all weights. Quantized formats leave embeddings and the output matrix at 16 bits."""
        dtype = dtype or self.dtype
        size = dtype_bytes(dtype)
        if size >= 2 or self.nominal_params is not None:
            return round(self.params * size)
        kept = self.embedding_params * (1 if self.tied_embeddings else 2)
        return round((self.params - kept) * size + kept * 2)

    # -- KV cache -----------------------------------------------------------------------------------------------

    @property
    def cache_dtype(self) -> str:
        """Of the cache and of states. Like vLLM's `kv_cache_dtype="auto"`: quantized weights leave them at 16 bits."""
        return self.dtype if self.dtype in ("float32", "float16") else "bfloat16"

    def kv_heads_per_gpu(self, tp: int) -> int:
        """A rank cannot hold less than one KV head: beyond kv_heads they are replicated."""
        return max(1, math.ceil(self.kv_heads / tp))

    def _kv_values_per_layer(self, tp: int) -> int:
        if self.latent:
            return self.kv_lora_rank + self.rope_head_dim
        return 2 * self.kv_heads_per_gpu(tp) * self.head_dim

    def kv_bytes_per_token(self, tp: int = 1, pp: int = 1, kv_dtype: str | None = None) -> int:
        """KV bytes that one more token of context takes on one GPU.

        2 * layers * max(1, kv_heads / tp) * head_dim * dtype bytes; a latent cache is not divided by tp; with pp
        the fullest stage counts. Layers of a sliding window are included: below the window they grow too.
        """
        stage_layers = math.ceil(self.attention_layers / pp)
        return round(stage_layers * self._kv_values_per_layer(tp) * dtype_bytes(kv_dtype or self.cache_dtype))

    def kv_bytes(
        self, tokens: int, block_tokens: int = 16, tp: int = 1, pp: int = 1, kv_dtype: str | None = None
    ) -> int:
        """KV bytes of one sequence on one GPU, in whole blocks; windows and constant states counted as such."""
        per_token = self.kv_bytes_per_token(tp, pp, kv_dtype)
        full_share = (self.attention_layers - self.sliding_layers) / max(1, self.attention_layers)
        whole = math.ceil(tokens / block_tokens) * block_tokens
        windowed = math.ceil(min(tokens, self.window_tokens) / block_tokens) * block_tokens
        cache_bytes = per_token * (full_share * whole + (1 - full_share) * windowed)
        state_bytes = self.linear_layers / pp * self.state_values / tp * dtype_bytes(self.cache_dtype)
        return round(cache_bytes + state_bytes)

    def check_layout(self, tp: int, pp: int = 1) -> None:
        """Raise UserError where a layout cannot run this model."""
        if tp < 1 or pp < 1:
            raise UserError(f"layout: tp={tp} pp={pp}: both must be at least 1")
        if self.heads % tp:
            raise UserError(
                f"tp: {tp} does not divide the {self.heads} attention heads of {self.name}; "
                f"use one of {', '.join(str(d) for d in range(1, self.heads + 1) if self.heads % d == 0)}"
            )
        if not self.latent and max(tp, self.kv_heads) % min(tp, self.kv_heads):
            raise UserError(
                f"tp: {tp} neither divides nor is a multiple of the {self.kv_heads} KV heads of {self.name}"
            )
        if pp > self.layers:
            raise UserError(f"pp: {pp} stages are more than the {self.layers} layers of {self.name}")


def from_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """Read a Hugging Face config mapping.

    Raises:
        UserError: a size that every decoder has is missing, or a layer type is not known here.
    """
    config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else dict(config)
    for key in _UNKNOWN_STRUCTURES:
        if config.get(key) not in (None, 1):
            raise UserError(
                f"model: layers described by `{key}` cannot be sized here; give a uniform decoder-only model"
            )
    label = name or str(config.get("name") or config.get("_name_or_path") or config.get("model_type") or "model")

    def need(*keys: str) -> int:
        for key in keys:
            if config.get(key) is not None:
                return int(config[key])
        raise UserError(f"model: config.json of {label} has no `{keys[0]}`; give the config of a decoder-only model")

    def maybe(*keys: str) -> int:
        for key in keys:
            if config.get(key) is not None:
                return int(config[key])
        return 0

    layers, hidden, heads = need("num_hidden_layers"), need("hidden_size"), need("num_attention_heads")
    kv_lora_rank = maybe("kv_lora_rank")
    experts = maybe("num_local_experts", "n_routed_experts", "num_experts")
    expert_intermediate = maybe("moe_intermediate_size", "intermediate_size") if experts else 0
    quantization = config.get("quantization_config") or config.get("compression_config")
    model_type = str(config.get("model_type", ""))
    sliding, linear = _layer_kinds(config, layers, label)
    return ModelShape(
        name=label,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=maybe("num_key_value_heads") or heads,
        head_dim=maybe("qk_nope_head_dim") if kv_lora_rank else maybe("head_dim") or hidden // heads,
        intermediate=need("intermediate_size", "moe_intermediate_size"),
        vocab=need("vocab_size"),
        max_context=maybe("max_position_embeddings") or 4096,
        dtype=_dtype(config, quantization),
        tied_embeddings=bool(config.get("tie_word_embeddings", model_type.startswith(_TIED))),
        attention_bias=bool(config.get("attention_bias", model_type == "qwen2")),
        qk_norm=model_type.startswith("qwen3"),
        experts=experts,
        experts_per_token=maybe("num_experts_per_tok", "experts_per_token", "top_k_experts") if experts else 0,
        expert_intermediate=expert_intermediate,
        shared_intermediate=maybe("shared_expert_intermediate_size") or maybe("n_shared_experts") * expert_intermediate,
        dense_layers=maybe("first_k_dense_replace") if experts else 0,
        kv_lora_rank=kv_lora_rank,
        q_lora_rank=maybe("q_lora_rank"),
        rope_head_dim=maybe("qk_rope_head_dim") if kv_lora_rank else 0,
        v_head_dim=maybe("v_head_dim") if kv_lora_rank else 0,
        sliding_layers=sliding,
        window_tokens=maybe("sliding_window"),
        linear_layers=linear,
        state_values=maybe("linear_num_value_heads") * maybe("linear_value_head_dim") * maybe("linear_key_head_dim"),
    )


def _dtype(config: Mapping[str, Any], quantization: Any) -> str:
    if isinstance(quantization, Mapping) and (quantized := quantized_dtype(quantization)):
        return quantized
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    return dtype if dtype in DTYPE_BYTES else "bfloat16"


def _layer_kinds(config: Mapping[str, Any], layers: int, label: str) -> tuple[int, int]:
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        windowed = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
        return (_windowed_layers(config, layers) if windowed else 0), 0
    unknown = set(kinds) - {"full_attention", "sliding_attention", "linear_attention"}
    if unknown:
        raise UserError(f"model: layer type {sorted(unknown)[0]!r} of {label} is not known; its cache cannot be sized")
    return kinds.count("sliding_attention"), kinds.count("linear_attention")


def _windowed_layers(config: Mapping[str, Any], layers: int) -> int:
    """All but every n-th layer; n from the config or from what its type means by saying nothing, else all of them."""
    pattern = config.get("sliding_window_pattern") or _WINDOW_PATTERNS.get(str(config.get("model_type")))
    if isinstance(pattern, str):
        return sum(pattern[i % len(pattern)] == "L" for i in range(layers))
    return layers - layers // pattern if pattern else layers


_NAMES = {
    "llama3-8b": "llama-3.1-8b",
    "llama3-70b": "llama-3.1-70b",
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
    "llama2-7b": "llama-2-7b",
    "llama-2-7b-hf": "llama-2-7b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "meta-llama-3.1-70b": "llama-3.1-70b",
}


@cache
def _packaged() -> dict[str, ModelShape]:
    folder = files("cluster.perf").joinpath("data/models")
    return {
        entry.name.removesuffix(".json"): from_config(json.loads(entry.read_text(encoding="utf-8")))
        for entry in sorted(folder.iterdir(), key=lambda e: e.name)
        if entry.name.endswith(".json")
    }


def known_models() -> list[str]:
    return list(_packaged())


def model_shape(model: str) -> ModelShape:
    """A named shape (`llama-3.1-70b`, `meta-llama/Llama-3.1-70B-Instruct`), a config.json, or a folder with one.

    Raises:
        UserError: neither a known name nor a readable config.
    """
    short = model.split("/")[-1].lower().removesuffix("-instruct").removesuffix("-chat")
    shapes = _packaged()
    for key in (model.lower(), short, _NAMES.get(short, "")):
        if key in shapes:
            return shapes[key]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise UserError(f"model: {path} is not a readable config.json ({e})") from None
        if not isinstance(config, dict):
            raise UserError(f"model: {path} holds no JSON object")
        return from_config(config, name=path.parent.name or path.name)
    close = difflib.get_close_matches(short, [*shapes, *_NAMES], n=1)
    hint = f"did you mean {_NAMES.get(close[0], close[0])}? " if close else ""
    raise UserError(
        f"model: {model!r} is neither a known shape nor a folder with a config.json; {hint}known: {', '.join(shapes)}"
    )


def nominal(shape: ModelShape, params: int) -> ModelShape:
    """The same shape, counted as `params` parameters ("a 70B model")."""
    return replace(shape, nominal_params=params)
