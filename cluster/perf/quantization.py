"""The type of a checkpoint's weights, from the `quantization_config` in its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Methods whose weights have one type, and the algorithms of NVIDIA's ModelOpt.
_METHODS = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "mxfp8": "fp8",
    "modelopt_mxfp8": "fp8",
    "modelopt_fp4": "fp4",
    "mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
}
_ALGORITHMS = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "MXFP8"), "fp8"),
    **dict.fromkeys(("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8"), "fp4"),
    **dict.fromkeys(("MXFP4", "W4A8_MXFP4_FP8"), "mxfp4"),
    **dict.fromkeys(("W4A16", "W4A16_AWQ", "W4A8_AWQ", "INT4_AWQ"), "int4"),
    **dict.fromkeys(("W8A16", "W8A8_SQ_PER_CHANNEL", "INT8_SQ"), "int8"),
}


def quantized_dtype(quantization: Mapping[str, Any]) -> str | None:
    """Type of the weights under a `quantization_config`; None where they are not quantized (the cache alone may be).

    What is not known here is told in words, so that whoever asks for its size is refused and everything else works.
    """
    method = str(quantization.get("quant_method") or "").lower()
    nested = quantization.get("quantization")
    algorithms = nested if isinstance(nested, Mapping) else quantization
    if "quant_algo" in algorithms:
        algorithm = str(algorithms["quant_algo"] or "").upper()
        return _ALGORITHMS.get(algorithm, f"{method or 'modelopt'} {algorithm}") if algorithm else None
    groups = quantization.get("config_groups")
    if isinstance(groups, Mapping):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        kinds = sorted({_group_dtype(w) for w in weights if isinstance(w, Mapping)})
        return (kinds[0] if len(kinds) == 1 else f"{method} of {' and '.join(kinds)}") if kinds else None
    bits = quantization.get("bits") or quantization.get("w_bit")
    if method == "bitsandbytes":
        bits = 4 if quantization.get("load_in_4bit") else 8 if quantization.get("load_in_8bit") else None
    if method in _METHODS:
        return _METHODS[method]
    if bits in (4, 8):
        return f"int{bits}"
    return f"{method} with {bits} bits" if bits else method or None


def _group_dtype(weights: Mapping[str, Any]) -> str:
    """Type of one group of compressed-tensors: by bits, kind, and (two 4-bit floats) how many share a scale."""
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if kind == "float" and bits == 4:
        return "mxfp4" if weights.get("group_size") == 32 else "fp4"
    names = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4"}
    return names.get((str(kind), bits), f"{kind} with {bits} bits") if isinstance(bits, int) else f"{kind} {bits}"
