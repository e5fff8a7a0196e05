"""A short name for the content of a model, so that two engines can tell that they loaded the same files."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
SAMPLE_BYTES = 1 << 16


def weights_digest(model: str, revision: str | None = None) -> str | None:
    """Digest of a folder's configuration and weights, or the commit of a Hugging Face id in the local hub cache.

    Of each weight file its name, its size and its first and last 64 KiB are read: the head of a safetensors file
    names every tensor, and reading hundreds of gigabytes would delay every start.

    Returns:
        None where nothing is known about the model's files.
    """
    folder = Path(model)
    if folder.is_dir():
        return _folder(folder)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(cached).parent.name if isinstance(cached, str) else None


def _folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in WEIGHTS:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLE_BYTES))
                file.seek(max(0, size - SAMPLE_BYTES))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
