"""A model's `config.json`, read without loading the model: what a layout can be checked against in milliseconds."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from cluster.config import ModelConfig
from cluster.errors import ConfigError
from cluster.models import smollm2
from cluster.models.resolve import SMOLLM2, SMOLLM2_PADDED, resolve


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """The configuration mapping of any model that `resolve` takes. Fetches no weights.

    For a Hugging Face id: from the local hub cache, else from the shapes in this package, else from the hub.

    Raises:
        ConfigError: no such model, or its configuration cannot be read or fetched.
    """
    if model.id in (SMOLLM2, SMOLLM2_PADDED):
        return smollm2.hf_config(pad_heads=model.id == SMOLLM2_PADDED)
    found = resolve(model)
    if found.is_folder:
        return _read(Path(found.path) / "config.json", model.id)
    cached = _from_hub(model, offline=True)
    return cached or _packaged(model.id) or _from_hub(model, offline=False) or {}


def _read(path: Path, model_id: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError("model.id", f"config.json of '{model_id}' is not readable JSON ({e})") from None
    if not isinstance(value, dict):
        raise ConfigError("model.id", f"config.json of '{model_id}' holds no JSON object")
    return value


def _packaged(model_id: str) -> dict[str, Any] | None:
    name = model_id.split("/")[-1].lower().removesuffix("-instruct")
    entry = files("cluster.perf").joinpath(f"data/models/{name}.json")
    return json.loads(entry.read_text(encoding="utf-8")) if entry.is_file() else None


def _from_hub(model: ModelConfig, *, offline: bool) -> dict[str, Any] | None:
    """None where `offline` finds nothing."""
    import huggingface_hub  # 0.2 s; only for models that are neither here nor in a folder

    try:
        path = huggingface_hub.hf_hub_download(
            model.id, "config.json", revision=model.revision, local_files_only=offline, etag_timeout=5
        )
    except Exception as e:  # the hub's client raises its own, requests' and httpx's errors
        if offline:
            return None
        where = f"'{model.id}'" + (f" at revision '{model.revision}'" if model.revision else "")
        raise ConfigError(
            "model.id",
            f"config.json of {where} cannot be fetched from the model hub ({type(e).__name__})",
            "check the id and the network, or give the path of a folder",
        ) from None
    return _read(Path(path), model.id)
