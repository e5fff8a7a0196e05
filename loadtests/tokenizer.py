"""The served model's tokenizer, found without importing a model library; plain words where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cluster.errors import ConfigError
from cluster.models.resolve import EMBEDDED, embedded_path

_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "zu", "ha")


class FileTokenizer:
    """`tokenizer.json` of a model folder, by the tokenizers library alone (0.1 s instead of 4).

    Raises:
        ConfigError: the file is no tokenizer.
    """

    exact = True

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self.path = path
        try:
            self._inner = Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises nothing narrower
            problem = f"{str(path)!r} is no tokenizer ({str(e)[:120]})"
            raise ConfigError("--tokenizer", problem, "fetch the whole file (git lfs pull), or give `words`") from None

    def __len__(self) -> int:
        return int(self._inner.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._inner.decode(token_ids))


class PlainWords:
    """Invented two-syllable words, taken as one token each. The server's own count is what the report shows."""

    exact = False

    def __init__(self) -> None:
        self._words = [f" {a}{b}" for a in _SYLLABLES for b in _SYLLABLES]
        self._index = {word.strip(): i for i, word in enumerate(self._words)}

    def __len__(self) -> int:
        return len(self._words)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self._index[word] for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self._words[i] for i in token_ids)


def find_tokenizer(
    name: str | None, served: str, *, cached: Callable[[str], Path | None] | None = None
) -> FileTokenizer | PlainWords:
    """The tokenizer for the model that an endpoint serves.

    Args:
        name: what the user asked for: a folder, a `tokenizer.json`, a Hugging Face id in the local cache, `words`.
        served: the model's name at the endpoint, tried where `name` is None.
        cached: finds `tokenizer.json` of a Hugging Face id on this disk.

    Raises:
        ConfigError: `name` was given and is none of these.
    """
    wanted = name or served
    if wanted == "words":
        return PlainWords()
    if wanted == EMBEDDED:
        return FileTokenizer(embedded_path() / "tokenizer.json")
    path = Path(wanted)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.name == "tokenizer.json" and file.is_file():
        return FileTokenizer(file)
    hit = (cached or _in_hub_cache)(wanted)
    if hit is not None:
        return FileTokenizer(hit)
    if name is not None:
        raise ConfigError("--tokenizer", f"{name!r}: no tokenizer.json there", "give a model folder, or `words`")
    return PlainWords()


def _in_hub_cache(model_id: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    if os.sep in model_id.strip(os.sep).replace("/", "", 1):
        return None
    try:
        hit = try_to_load_from_cache(model_id, "tokenizer.json")
    except ValueError:
        return None
    return Path(hit) if isinstance(hit, str) else None
