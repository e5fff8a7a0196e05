"""From `model:` of a ClusterConfig to something an engine can load.

| id | result |
|---|---|
| `embedded` | the tiny chat model inside this package; no network, no download |
| `smollm2`, `smollm2-padded` | SmolLM2-135M-Instruct, fetched and converted once into the user's cache |
| a path | a folder with `config.json`; anything else is one line of error |
| a Hugging Face id | passed through; the engine (or `HF_HOME`) has it or fetches it |
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from cluster.config import ModelConfig
from cluster.errors import ConfigError

Progress = Callable[[str], None]

EMBEDDED = "embedded"
SMOLLM2 = "smollm2"
SMOLLM2_PADDED = "smollm2-padded"
NAMED = (EMBEDDED, SMOLLM2, SMOLLM2_PADDED)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that an engine can load.

    Attributes:
        path: absolute folder, or a Hugging Face id where `source` is "hub".
        name: what clients call the model.
        revision: of a Hugging Face id; None where the folder is the revision.
    """

    path: str
    name: str
    revision: str | None
    source: Literal["embedded", "smollm2", "path", "hub"]

    @property
    def is_folder(self) -> bool:
        return self.source != "hub"


def resolve(model: ModelConfig, *, progress: Progress | None = None, cache: Path | None = None) -> ResolvedModel:
    """Find the model; fetch and convert SmolLM2 if that is asked for and not in `cache` yet.

    Args:
        progress: gets a line for each step of long work.
        cache: folder for converted models; default `~/.cache/pdserve/models`, or under XDG_CACHE_HOME.

    Raises:
        ConfigError: a path that does not exist or is no model, a misspelt name.
        UserError: SmolLM2 could not be fetched or written.
    """
    name = model.served_name or model.id
    if model.id == EMBEDDED:
        return ResolvedModel(str(embedded_path()), name, None, "embedded")
    if model.id in (SMOLLM2, SMOLLM2_PADDED):
        from cluster.models import smollm2  # only this branch needs numpy, torch and gguf

        folder = smollm2.ensure(cache, pad_heads=model.id == SMOLLM2_PADDED, progress=progress or _silent)
        return ResolvedModel(str(folder), name, None, "smollm2")
    if _looks_like_a_path(model.id):
        return ResolvedModel(str(_model_folder(model.id)), name, None, "path")
    if close := difflib.get_close_matches(model.id, NAMED, n=1, cutoff=0.8):
        raise ConfigError("model.id", f"'{model.id}' is no model here", f"did you mean `{close[0]}`?")
    return ResolvedModel(model.id, name, model.revision, "hub")


def embedded_path() -> Path:
    """Folder of the model in the package, in Hugging Face format."""
    return Path(str(files("cluster.models"))) / "tiny"


def _looks_like_a_path(model_id: str) -> bool:
    return Path(model_id).expanduser().exists() or _HUB_ID.fullmatch(model_id) is None


def _model_folder(model_id: str) -> Path:
    folder = Path(model_id).expanduser().resolve()
    if not folder.exists():
        raise ConfigError(
            "model.id",
            f"'{model_id}' does not exist",
            f"give a folder with config.json, a Hugging Face id, or one of {', '.join(NAMED)}",
        )
    if not (folder / "config.json").is_file():
        raise ConfigError("model.id", f"'{model_id}' has no config.json", "give a folder in Hugging Face format")
    return folder


def _silent(line: str) -> None:
    del line
