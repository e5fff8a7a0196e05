"""Text of a workload encodes to exactly the tokens that the workload says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.workload.text import TextWriter

TINY = Path(__file__).resolve().parents[2] / "cluster" / "models" / "tiny" / "tokenizer.json"


class Words:
    """A tokenizer of whole words: token i is ` w` and a letter sequence."""

    def __init__(self, n: int) -> None:
        self.words = [" " + "w" + "".join(chr(97 + int(d)) for d in str(i)) for i in range(n)]
        self.index = {w: i for i, w in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [self.index[" " + w] for w in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self.words[i] for i in token_ids)


PROMPT = ((5, 300), (9, 200), (2**60 + 7, 12))


def test_text_and_tokens_agree_and_repeat() -> None:
    tokenizer = Words(400)
    writer, again = TextWriter(tokenizer), TextWriter(Words(400))
    ids = writer.token_ids(PROMPT)
    assert len(ids) == 512
    assert tokenizer.encode(writer.text(PROMPT), add_special_tokens=False) == ids == again.token_ids(PROMPT)
    assert writer.token_ids(((5, 100),)) == ids[:100], "a shorter segment is a prefix of a longer one"
    assert writer.token_ids(((6, 100),)) != ids[:100]
    assert len(set(ids)) > 200


def test_messages_end_with_the_user_and_keep_every_word() -> None:
    writer = TextWriter(Words(400))
    turns = writer.messages(((1, 5), (2, 6), (3, 7), (4, 8)), alternate=True)
    assert [m["role"] for m in turns] == ["system", "user", "assistant", "user"]
    odd = writer.messages(((1, 5), (2, 6), (3, 7)), alternate=True)
    assert odd[-1]["role"] == "user"
    joined = writer.messages(((1, 5), (2, 6), (3, 7)), alternate=False)
    assert [m["role"] for m in joined] == ["system", "user"]
    assert sum(len(m["content"].split()) for m in joined) == 18
    assert [m["role"] for m in writer.messages(((1, 5),), alternate=True)] == ["user"]


def test_a_tokenizer_without_words_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="single-token words"):
        TextWriter(Words(3))


@pytest.mark.skipif(not TINY.exists(), reason="the embedded model is not in the package")
def test_the_embedded_models_byte_level_tokenizer() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer.from_file(str(TINY))

    class Tiny:
        def __len__(self) -> int:
            return inner.get_vocab_size()

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return inner.encode(text, add_special_tokens=add_special_tokens).ids

        def decode(self, token_ids: list[int]) -> str:
            return inner.decode(token_ids)

    writer = TextWriter(Tiny())
    assert Tiny().encode(writer.text(PROMPT), add_special_tokens=False) == writer.token_ids(PROMPT)
    assert json.loads(TINY.read_text())["model"]["type"] == "BPE"
