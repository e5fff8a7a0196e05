"""Simulated engines that say what a test wants: tokens of a script after some prompts, in this process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.config import ModelConfig
from cluster.engine import simulated
from cluster.engine.simulation.tokens import TokenStream
from cluster.models.resolve import resolve

_SHIFTED = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255)]


class Script:
    """Answers by prompt. A prompt and some of its answer is continued with the rest, by whichever engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._answers: dict[tuple[int, ...], list[int]] = {}
        monkeypatch.setattr(simulated, "TokenStream", self._stream)

    def answer(self, prompt: Sequence[int], tokens: list[int]) -> None:
        self._answers[tuple(prompt)] = tokens

    def _stream(self, prompt: Sequence[int], lowest: int, highest: int) -> TokenStream | _Scripted:
        for start, tokens in self._answers.items():
            if tuple(prompt[: len(start)]) == start:
                return _Scripted(tokens, len(prompt) - len(start))
        return TokenStream(prompt, lowest, highest)


class _Scripted:
    def __init__(self, tokens: list[int], position: int) -> None:
        self._tokens, self._position = tokens, position

    def take(self, count: int) -> list[int]:
        begin, self._position = self._position, self._position + count
        assert self._position <= len(self._tokens), "the script is too short"
        return self._tokens[begin : self._position]


class Vocabulary:
    """Token ids of the embedded model by their text or byte."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(f"{resolve(ModelConfig()).path}/tokenizer.json")

    def ids(self, *texts: str) -> list[int]:
        """One token per text; every text must be a token."""
        return [self._id(text.replace(" ", "Ġ")) for text in texts]

    def byte(self, value: int) -> int:
        """The token of a single byte, in the alphabet of byte-level BPE."""
        return self._id(chr(256 + _SHIFTED.index(value)) if value in _SHIFTED else chr(value))

    def _id(self, text: str) -> int:
        token = self._tokenizer.token_to_id(text)
        assert token is not None, f"{text!r} is no token"
        return int(token)
