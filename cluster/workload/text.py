"""From segments to token ids and text, for one tokenizer: the same workload against a live endpoint.

A segment is written in words that are single tokens of the tokenizer (a space and letters), so that the text of a
prompt encodes to exactly the tokens that the workload says. Token j of a segment is a hash of its content id and
j: nothing is stored, every process writes the same text, and `(7, 100)` is the beginning of `(7, 300)`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.errors import ConfigError
from cluster.workload.arrival import Prompt
from cluster.workload.blocks import mix64

MIN_WORDS = 16


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def __len__(self) -> int: ...


class TextWriter:
    """Writes prompts in single-token words of `tokenizer`.

    Raises:
        ConfigError: the tokenizer has too few such words; use token ids of its own then.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_words: int = 4096) -> None:
        words: list[str] = []
        ids: list[int] = []
        for token_id in range(len(tokenizer)):
            word = tokenizer.decode([token_id])
            if word[:1] == " " and word[1:].isascii() and word[1:].isalpha() and len(word) > 2:
                words.append(word)
                ids.append(token_id)
                if len(words) == max_words:
                    break
        # A word must also encode to itself behind another one: " a" + " b" is not always two tokens.
        good = _self_encoding(tokenizer, words, ids)
        if len(good) < MIN_WORDS:
            raise ConfigError("tokenizer", f"has {len(good)} single-token words, fewer than {MIN_WORDS}")
        self._words = np.array([w for w, _ in good], dtype=object)
        self._ids = np.array([i for _, i in good], dtype=np.int64)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens; as many as the workload says."""
        ids: list[int] = []
        for content, tokens in prompt:
            ids.extend(self._ids[self._choose(content, tokens)].tolist())
        return ids

    def text(self, prompt: Prompt) -> str:
        """Text that encodes to `token_ids(prompt)`."""
        return "".join(self.segment(content, tokens) for content, tokens in prompt)

    def segment(self, content: int, tokens: int) -> str:
        return "".join(self._words[self._choose(content, tokens)].tolist())

    def messages(self, prompt: Prompt, *, alternate: bool) -> list[dict[str, str]]:
        """Chat messages. The first of several segments is the system prompt.

        Args:
            alternate: the rest are turns of user and assistant (chat, agents); otherwise one user message.
        """
        parts = [self.segment(content, tokens) for content, tokens in prompt]
        system, rest = (parts[:1], parts[1:]) if len(parts) > 1 else ([], parts)
        messages = [{"role": "system", "content": text} for text in system]
        if alternate:
            last = len(rest) - 1
            # The last turn is the user's, whatever stands before it.
            roles = ["user" if (last - i) % 2 == 0 else "assistant" for i in range(len(rest))]
            return messages + [{"role": role, "content": text} for role, text in zip(roles, rest, strict=True)]
        return [*messages, {"role": "user", "content": "".join(rest)}]

    def _choose(self, content: int, tokens: int) -> npt.NDArray[np.intp]:
        with np.errstate(over="ignore"):
            z = np.uint64(mix64(content)) + np.arange(tokens, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
        return (z % np.uint64(len(self._ids))).astype(np.intp)


def _self_encoding(tokenizer: Tokenizer, words: list[str], ids: list[int]) -> list[tuple[str, int]]:
    """Words that encode to their own token, alone and in a row."""
    pairs = [
        (word, token_id)
        for word, token_id in zip(words, ids, strict=True)
        if tokenizer.encode(word, add_special_tokens=False) == [token_id]
    ]
    together = tokenizer.encode("".join(word for word, _ in pairs), add_special_tokens=False)
    if together == [token_id for _, token_id in pairs]:
        return pairs
    return [p for p in pairs if tokenizer.encode(p[0] + p[0], add_special_tokens=False) == [p[1], p[1]]]
